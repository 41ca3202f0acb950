"""The exception of a failed check."""

from __future__ import annotations


class ProbeFailure(Exception):
    """`peers` is None for this rank's own fault, [] for an unknown rank's fault, else the ranks to blame.

    `next` is one sentence on what to try next.
    """

    def __init__(self, detail: str, peers: list[int] | None = None, next: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.peers = peers
        self.next = next
