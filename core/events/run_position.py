"""Where in the run an event of a rank happened."""

from __future__ import annotations

import msgspec


class RunPosition(msgspec.Struct, frozen=True):
    """A place in the run. `seq` counts what the rank had issued on all its process groups, messages too.

    -1 is unknown: no batch has begun, or there is no process group. `time_ns` is the host's own clock.
    """

    rank: int
    attempt: int = 0
    step: int = 0
    batch: int = -1
    root: str = ""
    page: int = -1
    seq: int = -1
    time_ns: int = 0
    clock: dict[str, int] = {}
    """Name of a process group -> collectives that the rank had issued on it; -1: it counts nothing."""
    sent: dict[str, dict[int, int]] = {}
    """Name of a process group -> rank of the peer (-1: not known) -> sends that the rank had begun."""
    received: dict[str, dict[int, int]] = {}
    """Likewise the receives that had reached their end."""

    @property
    def collectives(self) -> int:
        """How many collectives the rank had issued on all groups that count; -1 if that is not known.

        Sums of two ranks can stand beside each other, and put nothing in order.
        """
        return sum(max(0, count) for count in self.clock.values()) if self.clock else self.seq


class RankEvent(msgspec.Struct, frozen=True):
    """An event of one rank: each says where in the run it happened."""

    where: RunPosition
