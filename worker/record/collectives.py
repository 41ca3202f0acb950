"""The operations that this rank has issued on its process groups: the only clock that ranks share.

`issued` counts all operations, sends and receives too. If it grew between two places on this rank, a value may have
arrived from another rank. It is a sum and does not order two ranks. For that, each of its values has a moment: the
collectives on each group, and the messages to and from each peer.

All members issue the collectives of a group in the same order, and each counts them: the numbers are in sync
(torch/csrc/distributed/c10d/Backend.hpp, getSequenceNumberForGroup). So what rank A computes between its fourth and
its fifth collective reaches rank B with B's fifth at the earliest. A clock cannot say that: the clocks of two hosts
differ, and an earlier time is no sign that a value has arrived.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...core.events.alarms import IssuedMoment
from ...core.events.run_position import RunPosition
from ...core.signal_errors import from_outside

if TYPE_CHECKING:
    from .group_operations import GroupTable  # it imports torch, and this file is needed before the script does

_modules = sys.modules
_MOST_MOMENTS = 2048


class _MomentHistory:
    """The moments of this process, and the counters that they are made from."""

    def __init__(self) -> None:
        self.seq = -1
        """The last result of `issued`."""
        self.groups = 0
        """The number of groups then."""
        self.moments: deque[IssuedMoment] = deque(maxlen=_MOST_MOMENTS)
        self.table: Callable[[], GroupTable | None] = lambda: None
        self.silent: dict[int, weakref.ref[Any]] = {}
        """Groups whose backend has no counter, by id: torch's `fake`."""


_history = _MomentHistory()


def count_with(table: GroupTable) -> None:
    """Use `table` from now on to distinguish collectives from messages."""
    _history.table = weakref.ref(table)


def count_issued() -> int:
    """Number of operations issued on all process groups that count; -1 if there is none. Takes about 0.2 us a group.

    Each group counts its own (`ProcessGroup._get_sequence_number_for_group`), including the bucket reductions of DDP.
    A receive counts once more when it has ended.
    """
    module = _modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return -1
    history = _history
    try:
        groups = module._pg_map  # as `_world.pg_map`, without the call of a property
        if not groups:
            return -1
        number = len(groups)
        table = history.table()
        total = table.messages.received if table is not None else 0
        if history.silent:
            groups = _counting(groups)
            if not groups:
                return -1
        # torch counts what C++ issues as well, and so DDP's buckets
        for group in groups:
            total += group._get_sequence_number_for_group()
    except Exception as error:
        if from_outside(error):
            raise
        # a group without a counter, such as `fake`, raises RuntimeError (Backend.hpp); so does a dictionary that
        # another thread changes
        return count_issued() if _leave_out_silent() else -1
    if total != history.seq or number != history.groups:
        history.seq, history.groups = total, number
        sent, received = table.messages_by_peer() if table is not None else ({}, {})
        # only where something was issued: an event asks for a moment much later than it happened
        history.moments.append(IssuedMoment(total, clock(), sent, received))
    return int(total)


issued: Callable[[], int] = count_issued
"""As `count_issued`."""
try:
    from ..native.core import IssuedCounter
except ImportError:  # gpuwatch was installed without a C compiler
    pass
else:  # it runs no bytecode, at which a signal's handler could raise, unless something was issued
    issued = IssuedCounter(_history, count_issued)


def clock() -> dict[str, int]:
    """Name of a process group -> collectives issued on it; -1: it counts nothing. All members use the same name."""
    module = _modules.get("torch.distributed.distributed_c10d")
    if module is None or module.GroupMember.WORLD is None:
        return {}
    try:
        return {str(group.group_name): _count_of(group) for group in module._pg_map}
    except Exception as error:  # another thread makes a group
        if from_outside(error):
            raise
        return {}


def moment(seq: int) -> IssuedMoment:
    """The counts when `issued` returned `seq`; without counts if they are not kept any more."""
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


def _count_of(group: Any) -> int:
    table = _history.table()
    try:
        return table.count_of(group) if table is not None else int(group._get_sequence_number_for_group())
    except RuntimeError as error:  # its backend has no counter
        if from_outside(error):
            raise
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
            except RuntimeError as error:
                if from_outside(error):
                    raise
                silent[id(group)] = weakref.ref(group)
                found = True
    except Exception as error:  # another thread makes a group
        if from_outside(error):
            raise
        return False
    return found
