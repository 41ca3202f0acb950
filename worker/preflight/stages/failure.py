"""What a stage raises when a check does not hold."""

from __future__ import annotations


class ProbeFailure(Exception):
    """`peers` None: this rank's own fault; []: somebody else's, nobody knows whose; else the ranks to blame.

    `next` is what to try next, as one sentence.
    """

    def __init__(self, detail: str, peers: list[int] | None = None, next: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.peers = peers
        self.next = next
