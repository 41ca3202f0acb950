"""A rank of a simulated job: a real recorder, written as the worker's hooks write it, without torch.

What the hooks do when they leave a call out is written here once more. Where theirs changes, this changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuwatch.core.events.alarms import Anomaly, RangeWarning
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.own_limits import NotLookedInto, OwnFault, UnmeasuredTensor
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptError, ScriptExit
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.layout import HeadField, HooksState, RankPhase, file_name, seal
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import PENDING, NonFinite, ValueEncoding

from .oracle import Call, Oracle
from .schedule import Schedule

FLOAT32 = ValueEncoding.FLOAT32 << 8
NO_PROCESS = 1 << 22
"""No process has this number, or a higher one."""
MOST_FAULTS = 20
"""After which the hooks are removed (worker/module_hooks.py)."""


class Worker:
    """One rank in one attempt. `life` is its script; each `yield` is a place where the others may go on."""

    def __init__(self, folder: Path, schedule: Schedule, oracle: Oracle, rank: int, attempt: int) -> None:
        self.rank = rank
        self.attempt = attempt
        self.pid = NO_PROCESS + 1000 * attempt + rank
        self.code: int | None = None
        """What its process has ended with."""
        self.path = folder / file_name(rank, attempt)
        self._schedule = schedule
        self._oracle = oracle
        self._writer: RecorderWriter | None = None
        self._lost: RecorderWriter | None = None
        """What was mapped when the script went on as another program."""
        self._watched = False
        self._cleared = False
        """The script has cleared torch's hooks; at the batch's end they are put back."""
        self._without_hooks: list[Call] = []
        self._exits = False
        self._late: list[tuple[int, Call, RunPosition, int]] = []
        """(where its number comes to, ...) of the calls that are not judged yet."""
        self._at = RunPosition(rank, attempt)

    def life(self) -> Iterator[None]:
        """The script."""
        schedule = self._schedule
        start = schedule.at_start.get((self.attempt, self.rank), "")
        if start == "never started":
            self._oracle.call(self.rank, f"{self._who}, never started")
            self.code = 1
            return
        if start != "no recorder":
            self._open(start)
        yield
        number = 0
        for batch in range(schedule.batches):
            skipped = batch % schedule.every != 0
            page = self._begin_batch(batch, skipped)
            yield
            for module in range(schedule.calls):
                what = schedule.in_calls.get((self.attempt, self.rank, number), "")
                number += 1
                self._call(what, module, skipped)
                if self.code is not None:
                    return
                yield
                self._numbers_come()
            self._end_batch(page)
            if self.code is not None:
                return
            yield
        self._numbers_come()
        self._end()

    def stop(self, code: int) -> None:
        """End it from outside."""
        if self.code is None:
            self._ends_in_a_batch(code)

    def _ends_in_a_batch(self, code: int) -> None:
        """Nothing comes of a batch whose missing hooks were to be noticed only later."""
        self.code = code
        for call in self._without_hooks:
            call.returned = False

    def close(self) -> None:
        """Unmap the recorder."""
        for writer in (self._writer, self._lost):
            if writer is not None:
                writer.close()

    @property
    def _who(self) -> str:
        return f"rank {self.rank}, attempt {self.attempt}"

    def _open(self, start: str) -> None:
        size = self._schedule.world_size
        writer = self._writer = RecorderWriter(
            self.path,
            rank=self.rank,
            local_rank=self.rank,
            world_size=size,
            attempt=self.attempt,
            log_bytes=16 << 10,
            segments=3,
        )
        writer.fields[HeadField.PID] = self.pid
        writer.identify(self.rank, self.rank, size, self.attempt)
        if start == "hooks failed":
            writer.fields[HeadField.HOOKS] = HooksState.FAILED
            writer.append(OwnFault(self._at, "attach", "RuntimeError: no hooks"))
        else:
            writer.fields[HeadField.HOOKS] = HooksState.ATTACHED
            self._watched = True
        writer.append(RootDef(0, "Net"), name=True)
        for module in range(self._schedule.calls):
            writer.append(ModuleDef(module, 0, f"layer{module}", "Linear"), name=True)
            writer.append(SlotDef(module, module, "output"), name=True)
        self._enter(RankPhase.SCRIPT)

    def _enter(self, phase: RankPhase) -> None:
        if self._writer is not None:
            self._writer.fields[HeadField.PHASE] = phase

    def _begin_batch(self, batch: int, skipped: bool) -> Any:
        writer = self._writer
        if writer is None or not self._watched:
            self._at = RunPosition(self.rank, self.attempt, batch=batch)
            return None
        if skipped:
            writer.fields[HeadField.BATCHES_SKIPPED] += 1
            writer.fields[HeadField.BATCH] = batch
            self._at = RunPosition(self.rank, self.attempt, batch, batch, "Net")
            return None
        page = writer.begin_page(0, batch, batch)
        self._at = RunPosition(self.rank, self.attempt, batch, batch, "Net", page.number, batch)
        self._enter(RankPhase.FORWARD)
        return page

    def _end_batch(self, page: Any) -> None:
        writer = self._writer
        if self._cleared:
            self._cleared, self._watched = False, True
            self._without_hooks.clear()
            self._set("HOOKS_GONE", 1)
        if writer is not None and self._watched and page is not None:
            writer.end_page(page)
            writer.fields[HeadField.STEP] += 1
            self._enter(RankPhase.SCRIPT)
        if self._exits:
            self.code = 0
            if self._watched and not self._late:
                self._set("LEFT", seal(1))

    def _set(self, field: str, value: int) -> None:
        """A field that a version of ours may not have yet (schedule.NEEDS)."""
        if self._writer is not None and self._watched:
            self._writer.fields[HeadField[field]] = value

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, what: str, module: int, skipped: bool) -> None:
        call = self._oracle.call(
            self.rank, f"{self._who}, batch {self._at.batch}, layer{module}", bad=what.startswith("bad")
        )
        writer = self._writer
        if what in ("exit in a forward", "kill", "raise"):
            call.returned = False
            self._fall(what, module)
        elif what == "child":
            self._oracle.call(self.rank, f"a child of {self._who}", bad=True)
            self._set("UNSEEN_CHILD", 4242)
        elif what == "calling child":
            self._oracle.call(self.rank, f"a child of {self._who}").in_child = True
            self._set("CALLING_CHILD", 4243)
        elif what == "exec":
            self._go_on_as_another_program()
        if self._cleared:
            self._without_hooks.append(call)
        if self.code is not None or writer is None or not self._watched:
            return
        if what == "thread":
            self._oracle.call(self.rank, f"a second thread of {self._who}", bad=True)
            self._set("CALLS_LEFT_OUT", 1)
            self._set("LEFT_OUT_PAGE", self._at.page)
        elif what == "full log":
            while writer.append(
                RangeWarning(self._at, "underflow", f"layer{module}", "Linear", "forward", "o", "float32")
            ):
                pass
        elif what in ("fault", "detach"):
            self._fail(MOST_FAULTS if what == "detach" else 1)
            return
        elif what == "compiled":
            writer.append(NotLookedInto(self._at, f"layer{module}", "Linear", around=False))
            return
        elif what == "unmeasured":
            writer.append(UnmeasuredTensor(self._at, f"layer{module}", "Linear", "output", "float32"))
            return
        elif what == "rows lost":
            writer.fields[HeadField.ROWS_LOST] += 1
            return
        elif what == "hooks cleared":
            self._watched = False
            self._cleared = True
            self._without_hooks.append(call)
            return
        elif what == "exit":
            self._exits = True  # at the batch's end
        elif what == "warn":
            writer.append(
                RangeWarning(self._at, "near overflow", f"layer{module}", "Linear", "forward", "o", "float32")
            )
        if skipped:  # the root's output alone is read: a bad value of within is taken to reach it
            call.skipped = True
            if call.bad:
                self._alarm(call, self._at, module)
            return
        try:
            self._record(call, module, late="late" in what)
        except Exception:  # its file is damaged; the hooks catch what their own code raises, and tell
            self._fail(1)

    def _record(self, call: Call, module: int, late: bool) -> None:
        writer = self._writer
        assert writer is not None
        number = (0, 0, PENDING) if late else _numbers(call)
        value = writer.value(*number)
        place = writer._values_at + writer.value_position * layout.VALUE.size
        writer.frame(module, layout.NOTHING, 0, 0, self._at.seq, [(module, value, layout.NOTHING, 1, 0, 0)])
        if late:
            self._late.append((place, call, self._at, module))
        else:
            self._judge(call, self._at, module)

    def _judge(self, call: Call, at: RunPosition, module: int) -> None:
        call.judged = True
        if call.bad:
            self._alarm(call, at, module)

    def _alarm(self, call: Call, at: RunPosition, module: int) -> None:
        assert self._writer is not None
        call.judged = True
        anomaly = Anomaly(at, module, f"layer{module}", "Linear", "forward", "output", "+inf", "float32")
        self._writer.append(anomaly)

    def _numbers_come(self, *, all_of_them: bool = False) -> None:
        """Let the late numbers of the device arrive, once in a while."""
        if self._writer is None or (not all_of_them and self._schedule.draw.random() < 0.5):
            return
        for place, call, at, module in self._late:
            layout.VALUE.pack_into(self._writer.view, place, *_numbers(call))
            self._judge(call, at, module)
        self._late.clear()

    def _fail(self, times: int) -> None:
        assert self._writer is not None
        for _ in range(times):
            self._writer.append(OwnFault(self._at, "forward hook", "RuntimeError: ours"))
        if times == MOST_FAULTS:
            states: Any = HooksState
            self._writer.fields[HeadField.HOOKS] = getattr(states, "DETACHED", HooksState.ATTACHED)
            self._watched = False

    def _go_on_as_another_program(self) -> None:
        self._numbers_come(all_of_them=True)
        self._enter(RankPhase.UNWATCHED)  # whatever has become of the hooks
        self._watched = self._cleared = False
        self._writer, self._lost = None, self._writer

    # -- the end ------------------------------------------------------------------------------------------------

    def _fall(self, how: str, module: int) -> None:
        writer = self._writer
        if how == "raise" and writer is not None:
            writer.append(ScriptError(self._at, "ValueError", "boom", "Traceback", f"layer{module}"))
            self._enter(RankPhase.RAISED)
        self._ends_in_a_batch({"raise": 1, "kill": -9}.get(how, 0))

    def _end(self) -> None:
        self.code = 0
        if self._writer is not None:
            self._writer.append(ScriptExit(self._at, 0))
            self._enter(RankPhase.FINISHED)


def _numbers(call: Call) -> tuple[int, int, int]:
    return (0, 0x7F800000, FLOAT32 | NonFinite.POSINF) if call.bad else (0x3F800000, 0x3F800000, FLOAT32)
