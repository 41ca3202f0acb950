"""What this rank has issued on its process groups: the only clock that ranks share.

`issued` counts everything, sends and receives too: between two places on this rank it tells whether a value can have
come from another one. It is a sum, and says nothing about the order of two ranks. For that there is a moment for each
of its numbers: the collectives on each group, and the messages to and from each peer.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...core.events import IssuedMoment, RunPosition

if TYPE_CHECKING:
    from .group_slots import GroupTable

_modules = sys.modules
_MOST_MOMENTS = 2048


class _MomentHistory:
    """The moments of this process, and what they are made of."""

    def __init__(self) -> None:
        self.seq = -1
        """What `issued` has returned last."""
        self.groups = 0
        """How many groups there were then."""
        self.moments: deque[IssuedMoment] = deque(maxlen=_MOST_MOMENTS)
        self.table: Callable[[], GroupTable | None] = lambda: None
        self.silent: dict[int, weakref.ref[Any]] = {}
        """Groups whose backend has no counter, by id: torch's `fake`."""


_history = _MomentHistory()


def count_with(table: GroupTable) -> None:
    """From now on `table` tells collectives from messages."""
    _history.table = weakref.ref(table)


def issued() -> int:
    """Sum of what was issued on all process groups that count; -1 if there is none. Takes about 0.2 us a group.

    Each group counts its own (`ProcessGroup._get_sequence_number_for_group`), including the bucket reductions of DDP.
    A receive counts once more when it has come to its end.
    """
    module = _modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return -1
    history = _history
    try:
        groups = module._pg_map  # what `_world.pg_map` returns, without the call of a property
        if not groups:
            return -1
        number = len(groups)
        table = history.table()
        total = table.received if table is not None else 0
        if history.silent:
            groups = _counting(groups)
            if not groups:
                return -1
        for group in groups:
            total += group._get_sequence_number_for_group()
    except Exception:
        return issued() if _leave_out_silent() else -1
    if total != history.seq or number != history.groups:
        history.seq, history.groups = total, number
        history.moments.append(_moment(total))
    return int(total)


def clock() -> dict[str, int]:
    """Name of a process group -> collectives issued on it; -1: it counts nothing. All members use the same name."""
    module = _modules.get("torch.distributed.distributed_c10d")
    if module is None or module.GroupMember.WORLD is None:
        return {}
    try:
        return {str(group.group_name): _count_of(group) for group in module._pg_map}
    except Exception:  # another thread makes a group
        return {}


def moment(seq: int) -> IssuedMoment:
    """What had been issued when `issued` returned `seq`; without counts if that is not known any more."""
    found = next((one for one in reversed(_history.moments) if one.seq == seq), None)
    return found if found is not None else IssuedMoment(seq)


def position(
    seq: int, rank: int, attempt: int, step: int = 0, batch: int = -1, root: str = "", page: int = -1
) -> RunPosition:
    """A place in the run, with what had been issued when `issued` returned `seq`. Its time is now."""
    then = moment(seq)
    return RunPosition(
        rank, attempt, step, batch, root, page, seq, time.time_ns(), then.clock, then.sent, then.received
    )


def moments(most: int, until: int) -> list[IssuedMoment]:
    """The last moments before `issued` returned `until`, the latest last."""
    earlier = (one for one in reversed(_history.moments) if one.seq < until)
    return list(islice(earlier, most))[::-1]


def ranks() -> int:
    """Size of the default process group; 1 if there is none."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or module.GroupMember.WORLD is None:
        return 1
    return int(module.GroupMember.WORLD.size())


def _moment(seq: int) -> IssuedMoment:
    table = _history.table()
    sent, received = table.messages() if table is not None else ({}, {})
    return IssuedMoment(seq, clock(), sent, received)


def _count_of(group: Any) -> int:
    table = _history.table()
    try:
        return table.count_of(group) if table is not None else int(group._get_sequence_number_for_group())
    except RuntimeError:  # its backend has no counter
        return -1


def _counting(groups: Iterable[Any]) -> list[Any]:
    silent = _history.silent
    return [group for group in groups if (ref := silent.get(id(group))) is None or ref() is not group]


def _leave_out_silent() -> bool:
    """Whether a group was found that has no counter, and was not known to have none."""
    silent = _history.silent
    found = False
    try:
        for group in _counting(_modules["torch.distributed.distributed_c10d"]._pg_map):
            try:
                group._get_sequence_number_for_group()
            except RuntimeError:
                silent[id(group)] = weakref.ref(group)
                found = True
    except Exception:  # another thread makes a group
        return False
    return found
