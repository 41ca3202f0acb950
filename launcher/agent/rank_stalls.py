"""The node agent's watch over ranks that do not move: reports one that stalls, and looks at all of them on request."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...core.events.agent_events import RankLook, RankStall
from ...core.guest.own_files import read_regular
from ...core.recorder.operation_mismatch import all_stand_in_mismatch
from ...core.recorder.stalls import (
    DeviceProgress,
    file_of,
    has_left_backward,
    pipe_of,
    read_dump,
    takes_long,
    with_device,
)
from .batch_history import LAST_STEPS
from .rank_watch import RESTS_S, RankWatch
from .stacks import StackLook

# How long a rank may stand still: as the user says, or learned from how long its steps take. Pure.

UNTIL_KNOWN_S = 300.0
"""Below the watchdog of NCCL (480 s) and the timeouts of process groups, which end a job and name nobody."""
LEAST_S = 60.0
STEP_TIMES = 10.0
KNOWN_STEPS = 3


class HangLimit(NamedTuple):
    """In seconds."""

    within_steps_s: float
    elsewhere_s: float
    """Before the first batch, and where it compiles, or saves or loads a checkpoint: unrelated to step times."""


def fixed_limit(seconds: float) -> HangLimit:
    """The user's own."""
    return HangLimit(seconds, seconds)


def learned_limit(steps_s: Collection[float]) -> HangLimit:
    """From the seconds of a rank's last steps.

    >>> learned_limit([40.0, 2.0, 3.0])
    HangLimit(within_steps_s=400.0, elsewhere_s=400.0)
    >>> learned_limit([2.0, 2.0, 3.0])
    HangLimit(within_steps_s=60.0, elsewhere_s=300.0)
    """
    if len(steps_s) < KNOWN_STEPS:
        return fixed_limit(UNTIL_KNOWN_S)
    within_s = max(LEAST_S, STEP_TIMES * max([*steps_s][-LAST_STEPS:]))
    return HangLimit(within_s, max(within_s, UNTIL_KNOWN_S))


# When a rank has not moved for too long: decided from what its recorder shows, and from how it has moved so far. Pure.
#
# A limit that suits one job is wrong for the next. A rank may rest for as long as the limit says (`HangLimit`), for
# three times the longest rest after which it moved again, and before its first batch for four times as long: it loads
# data there, and compiles models.

LONGEST_REST_TIMES = 3.0
TIMEOUT_SHARE = 0.8
"""Of its process group's timeout: the rank is looked at before that ends the job, and its position is gone."""
MISMATCH_S = 10.0
"""For how long operations that do not match are seen before that is told. Nothing is ended by it before the limit."""
BEFORE_FIRST_BATCH_TIMES = 4.0
TAKES_LONG_TIMES = 4.0
"""Where a rank compiles, or writes a checkpoint."""
_SCRIPT = frozenset({"script", "forward", "backward", "optimizer", "finished", "raised"})
"""Phases in which a rank is expected to move, or to end. What a preflight waits for has deadlines of its own."""


class RankRest:
    """How long one rank has rested. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._last: tuple[int, ...] = ()
        self._since = now
        self._longest = 0.0
        self._batch = -1
        """The newest one when it last moved."""
        self._times_told = 0
        self._timeout_told = False
        self._mismatch_told = False

    def seconds(self, now: float) -> float:
        """Since it last moved."""
        return now - self._since

    def moved(self, movement: tuple[int, ...], batch: int, now: float) -> None:
        """What its recorder shows now (`RecorderReader.movement`); `batch` is its newest one, -1 before the first."""
        if movement == self._last:
            return
        if min(batch - 1, self._batch) >= 0:  # rests before are of another kind: imports, compilation
            self._longest = max(self._longest, now - self._since)
        self._last, self._since, self._times_told, self._batch = movement, now, 0, batch
        self._timeout_told = self._mismatch_told = False

    def limit_s(self, batch: int, limit: HangLimit, *, takes_long: bool = False) -> float:
        """How long it may rest. `batch` is its newest one, -1 before the first."""
        times = max(BEFORE_FIRST_BATCH_TIMES if batch < 0 else 0.0, TAKES_LONG_TIMES if takes_long else 0.0)
        return max(limit.within_steps_s, times * limit.elsewhere_s, LONGEST_REST_TIMES * self._longest)

    def paused(self, seconds: float) -> None:
        """The agent did not look for this long, because the machine or the whole job was stopped: that was no rest."""
        self._since += seconds

    def is_told(self, phase: str, batch: int, limit: HangLimit, now: float) -> bool:
        """True when a rest has become too long, and each time that it has doubled since the last report."""
        limit_s = self.limit_s(batch, limit) * 2**self._times_told
        if phase not in _SCRIPT or self.seconds(now) <= limit_s:
            return False
        self._times_told += 1
        return True

    def is_before_timeout(self, phase: str, timeout_s: float, now: float) -> bool:
        """True once in a rest, shortly before a process group's timeout, unless the rest was told already."""
        if self._timeout_told or self._times_told or timeout_s <= 0 or phase not in _SCRIPT:
            return False
        self._timeout_told = self.seconds(now) > TIMEOUT_SHARE * timeout_s
        return self._timeout_told

    def is_in_mismatch(self, phase: str, now: float) -> bool:
        """True once in a rest of MISMATCH_S, if all members of its group stand in operations that do not match."""
        if self._mismatch_told or self._times_told or self.seconds(now) < MISMATCH_S or phase not in _SCRIPT:
            return False
        self._mismatch_told = True
        return True


# Asks a rank for its flight recorder of NCCL, and reads it: see core/recorder/stalls.py.

ANSWER_S = 6.0
"""It needs the rank's GIL, and a moment of a busy machine."""
_MOST_BYTES = 64 << 20


class NcclDump:
    """One question to one rank, asked at `now` (monotonic seconds)."""

    def __init__(self, folder: Path, rank: int, attempt: int, now: float) -> None:
        """`folder` is that of the node's recorders."""
        self._file = file_of(folder, rank, attempt)
        self._end = now + ANSWER_S
        self.found: dict[str, DeviceProgress] | None = None
        """By the groups' names; None if it has not answered."""
        with suppress(OSError):
            self._file.unlink()  # a late answer to an earlier question
        self._is_asked = _ask(pipe_of(folder, rank, attempt))

    def is_due(self, now: float) -> bool:
        """Whether it has answered, or will not."""
        if self._is_asked and self._file.exists():  # it is whole, and read once, whatever it is
            self._is_asked = False
            data = b""
            with suppress(OSError):
                data = read_regular(self._file, _MOST_BYTES)
            self.found = read_dump(data)
            self._file.unlink(missing_ok=True)
        return not self._is_asked or now >= self._end


def _ask(pipe: Path) -> bool:
    """False where nobody reads the pipe: torch has no CUDA there, or the rank has ended."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, b"?")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


MOST_SPYING = 16
"""Ranks that py-spy is asked about at a time."""
_EVERY_S = 1.0
_PAUSED_S = 5.0
"""The agent looks many times a second. After a gap this long, it was stopped itself: Ctrl-Z, a laptop asleep."""


class _RankQuestions(NamedTuple):
    """What one rank is asked at a stall."""

    number: int
    watch: RankWatch
    stack: StackLook
    nccl: NcclDump
    movement: tuple[int, ...]
    """When it was asked."""


class StallWatch:
    """Finds stalls of one node's ranks. `timeout_s` 0: reports none; None: learns each rank's limit from its steps."""

    def __init__(self, folder: Path, timeout_s: float | None) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._rests: dict[tuple[int, int], RankRest] = {}
        self._looks: list[_RankQuestions] = []
        self._next = 0.0
        self._looked = 0.0

    def stalled(self, watches: Collection[RankWatch], now: float) -> Iterator[RankStall]:
        """Ranks that have rested for too long, each once."""
        if self._looked and now - self._looked > _PAUSED_S:
            for rest in self._rests.values():
                rest.paused(now - self._looked)
        self._looked = now
        if now < self._next or self._timeout_s == 0:
            return
        self._next = now + _EVERY_S
        for key in self._rests.keys() - {(watch.rank, watch.attempt) for watch in watches if not watch.ended}:
            del self._rests[key]
        mismatched = _mismatched([watch for watch in watches if self._rests_long(watch, now)])
        for watch in watches:
            state = watch.state() if not watch.ended else None
            if state is None:
                continue
            rest = self._rest(watch, state.batch, now)
            limit = self._limit(watch)
            if (watch.rank, watch.attempt) in mismatched and rest.is_in_mismatch(state.phase, now):
                limit_s = rest.limit_s(state.batch, limit)
                yield RankStall(watch.where(state), round(limit_s, 1), mismatch_s=MISMATCH_S)
                continue
            if rest.is_told(state.phase, state.batch, limit, now):
                limit_s = rest.limit_s(state.batch, limit)
                yield RankStall(watch.where(state), round(limit_s, 1))
            elif rest.seconds(now) >= RESTS_S:
                timeout_s = watch.timeout_s()
                if rest.is_before_timeout(state.phase, timeout_s, now):
                    yield RankStall(watch.where(state), round(TIMEOUT_SHARE * timeout_s, 1), timeout_s)

    def _rests_long(self, watch: RankWatch, now: float) -> bool:
        """Whether it rested for MISMATCH_S at the last turn: only then are tables worth a comparison."""
        rest = self._rests.get((watch.rank, watch.attempt))
        return not watch.ended and rest is not None and rest.seconds(now) >= MISMATCH_S

    def inspect(self, watches: Collection[RankWatch], number: int, now: float) -> None:
        """Look at all of these ranks; `seen` gives what comes of it."""
        for watch in watches:
            if not watch.ended:
                movement = watch.movement()
                stack = StackLook(self._folder, watch.rank, watch.attempt, watch.pid, now)
                nccl = NcclDump(self._folder, watch.rank, watch.attempt, now)
                self._looks.append(_RankQuestions(number, watch, stack, nccl, movement))

    def seen(self, now: float) -> Iterator[RankLook]:
        """The looks that are finished."""
        due = [look for look in self._looks if self._is_due(look, now)]
        self._looks = [look for look in self._looks if look not in due]
        for number, watch, stack, nccl, movement in due:
            found = stack.result()
            state = watch.state()
            if state is None or watch.ended:
                continue
            rest = self._rest(watch, state.batch, now)
            phase = "script" if state.phase == "backward" and has_left_backward(found.stack) else state.phase
            yield RankLook(
                where=watch.where(state),
                number=number,
                still_s=round(rest.seconds(now), 1),
                phase=phase,
                module=state.module,
                cls=state.cls,
                groups=with_device(watch.groups(), nccl.found, time.time_ns()),
                **found._asdict(),
                limit_s=round(rest.limit_s(state.batch, self._limit(watch), takes_long=takes_long(found.stack)), 1),
                after=watch.ended_part(state.batch) if phase == "script" else "",
                moved=watch.movement() != movement,
            )

    def _is_due(self, look: _RankQuestions, now: float) -> bool:
        may_spy = sum(each.stack.spy is not None for each in self._looks) < MOST_SPYING
        return look.stack.is_due(now, may_spy=may_spy) and look.nccl.is_due(now)

    def close(self) -> None:
        """Let go of looks that are not finished."""
        for look in self._looks:
            look.stack.close()
        self._looks.clear()

    def _limit(self, watch: RankWatch) -> HangLimit:
        return learned_limit(watch.steps.last_s) if self._timeout_s is None else fixed_limit(self._timeout_s)

    def _rest(self, watch: RankWatch, batch: int, now: float) -> RankRest:
        rest = self._rests.setdefault((watch.rank, watch.attempt), RankRest(now))
        rest.moved(watch.movement(), batch, now)
        return rest


def _mismatched(watches: Collection[RankWatch]) -> set[tuple[int, int]]:
    """(rank, attempt) of those that stand in operations that do not match, with all members of their group."""
    attempt = max((watch.attempt for watch in watches), default=0)
    tables = {watch.rank: watch.groups() for watch in watches if watch.attempt == attempt}
    return {(rank, attempt) for rank in all_stand_in_mismatch(tables, MISMATCH_S)}
