"""The node agent's view of its ranks: reads their recorders and returns the changes. No socket, no process."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from ...core.events.agent_events import LimitForecast, WorkerExit
from ...core.events.alarms import Anomaly
from ...core.events.definitions import Definition, split_label
from ...core.events.log_entries import WorkerEvent
from ...core.events.own_limits import OwnFault
from ...core.events.rank_standing import EndedPart, GroupState
from ...core.events.run_position import RunPosition
from ...core.events.script_events import ScriptError, ScriptExit
from ...core.identity import is_rank, rank_name
from ...core.recorder.layout import HeadField, file_name
from ...core.recorder.reader import NotReady, RecorderReader
from ...core.recorder.stalls import file_of, has_left_backward, pipe_of, stack_file_name
from ...core.recorder.told_forecasts import tell_forecasts
from ...core.wire.beat import HotModule, NodeBeat, RankState
from ...core.wire.messages import AgentBody, EventMessage, NameDefinitions, PageMessage, WantedBatch
from ...core.wire.pipe import LastLook
from .batch_history import RankHistory, RankStepTimes
from .rank_pages import PageSelection, TracedBatches, pending_values
from .stacks import fatal_stacks
from .step_position import ended_part
from .unjudged_pages import unjudged_pages

T = TypeVar("T")

_FATAL = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
"""Signals after which a rank has written its stack."""
RESTS_S = 2.0
"""The beats of a rank that has not moved for this long say which collective it is in."""
GROWTH_PAGES = 6
"""How many pages from the beginning of a growth are sent."""
MOST_HOT = 4
"""How many modules of a rank a beat reports, with their headroom."""


@dataclass(eq=False, repr=False)
class RankWatch:
    """One rank of one attempt."""

    folder: InitVar[Path]
    rank: int
    attempt: int
    pid: int
    traced: InitVar[list[int]]
    """Batches that the user has asked for."""
    ranks: InitVar[int] = 1
    """How many the node has."""
    traces: InitVar[TracedBatches | None] = None
    """Which of the traced batches are sent."""

    def __post_init__(self, folder: Path, traced: list[int], ranks: int, traces: TracedBatches | None) -> None:
        self.ended = False
        self._even_damaged = False
        self._path = folder / file_name(self.rank, self.attempt)
        self._reader: RecorderReader | None = None
        self._pages = PageSelection(traced, traces if traces is not None else TracedBatches())
        self._alarm: Anomaly | None = None
        """Its first, of those in its log."""
        self._broken = False
        self._script_ended = False
        """Whether it has recorded how its script ended."""
        self._script_code: int | None = None
        """What it then ends with."""
        self._history = RankHistory(ranks)
        self._forecasts = 0
        self.steps = RankStepTimes()
        self._asked = False
        """Whether a batch of it was asked for, by its own anomaly or by the collector."""
        self._faults: dict[str, OwnFault | None] = {}
        """By part: errors of ours that cost no frame; None once reported."""

    def poll(self, now: float) -> list[AgentBody]:
        """What this rank has recorded since the last call."""
        if self._broken:
            return []
        try:
            return self._poll(now)
        except Exception as error:  # whatever is in the file, the other ranks of this node must be read on
            return [self._give_up(error)]

    def _give_up(self, error: Exception) -> AgentBody:
        self._broken = True
        what = f"{type(error).__name__}: {error}"
        return self._fault(
            f"the recorder of {rank_name(self.rank)} is damaged, and gpuwatch stopped reading it: {what}"
        )

    def _fault(self, note: str) -> AgentBody:
        return EventMessage(OwnFault(RunPosition(self.rank, self.attempt), "recorder", note))

    def _poll(self, now: float) -> list[AgentBody]:
        reader = self._open()
        if reader is None:
            return []
        header = reader.header()
        definitions, recorded = reader.new_entries() if reader.has_more(header) else ([], [])
        messages: list[AgentBody] = []
        if definitions:
            messages.append(NameDefinitions(self.rank, self.attempt, definitions))
        messages += self._look_back(reader, header, definitions, now)
        for event in map(self._of_this_rank, recorded):
            messages.append(EventMessage(event))
            if isinstance(event, ScriptExit | ScriptError):
                self._script_ended = True
                self._script_code = event.code if isinstance(event, ScriptExit) else 1
            if isinstance(event, Anomaly):
                self._alarm, self._asked = self._alarm or event, True
                self._pages.want_of(event, now)
        messages += self._pages.due(reader, now)
        return messages

    def want(self, want: WantedBatch, now: float) -> None:
        """The collector asks for a batch."""
        if want.attempt == self.attempt:
            self._asked = True
            self._pages.want((want.root_cls, want.root_ordinal, want.batch), now)

    def unjudged(self, now: float) -> list[AgentBody]:
        """Its pages with an alarm that it has not raised, now that it rests."""
        reader = self._reader
        if reader is None or self._broken or self._alarm is not None:
            return []
        try:
            pages = unjudged_pages(self._path)
            for page in pages:
                root = reader.roots.get(page.root)
                if root is not None:
                    self._asked = True
                    self._pages.want_at_once((root.cls, root.ordinal, page.batch), now)
            return [*self._pages.due(reader, now)] if pages else []
        except Exception as error:
            self._failed("pages at rest", error)
            return []

    def end(self, code: int | None, by: str, now: float, look: LastLook | None = None) -> list[AgentBody]:
        """The process has ended: read the rest, and send its last pages, its last state and where it was."""
        self._even_damaged = True  # nobody writes it any more: its head will not get better
        messages = self.poll(now)
        self.ended = self._pages.ended = True
        bare = EventMessage(WorkerExit(RunPosition(self.rank, self.attempt), code, by, "starting"))
        reader = self._reader
        if reader is None:
            return [*messages, bare]
        if reader.head_is_damaged:
            messages.append(self._fault(f"the head of the recorder of {rank_name(self.rank)} is damaged"))
        if not self._broken:
            try:
                return [*messages, *self._end(reader, code, by, now, look)]
            except Exception as error:
                messages.append(self._give_up(error))
        with suppress(Exception):  # whatever is damaged: the header may still say that the rank saw an overflow
            messages += self._unlogged_anomaly(reader)
        return [*messages, bare]

    def _end(
        self, reader: RecorderReader, code: int | None, by: str, now: float, look: LastLook | None
    ) -> list[AgentBody]:
        messages: list[AgentBody] = [*self._pages.due(reader, now), *self._pages.last(reader)]
        messages += self._unlogged_anomaly(reader)
        pending = sum(pending_values(kept) for held in reader.held() if (kept := reader.page(held.number)) is not None)
        state = replace(reader.state(), final=True, pending=pending, traces_thinned=self._pages.thinned)
        root = reader.roots.get(reader[HeadField.ROOT])
        label, page = root.label if root is not None else "", reader[HeadField.PAGE]
        where = RunPosition(self.rank, self.attempt, state.step, state.batch, label, page, state.seq)
        if state.phase == "finished" and not self._script_ended and code is not None and code >= 0:
            # its own Python could not tell the code that its script ended with (worker/joining.py)
            messages.append(EventMessage(ScriptExit(where, code)))
        if code is None and by == "itself":  # nobody could see it
            code = self._script_code
        exit_ = WorkerExit(where, code, by, state.phase, state.module, state.cls, reader.groups())
        exit_ = replace(exit_, heard=reader.heard())
        if look is not None:
            exit_ = replace(exit_, main=look.main, state=look.state, busy=look.busy, still_s=look.still_s)
        elif by == "itself":
            exit_ = replace(exit_, still_s=state.age_s)
        if by == "itself" and code is not None and -code in _FATAL:
            (stack, main), when_ns = fatal_stacks(self._path.parent, self.rank, self.attempt)
            exit_ = replace(exit_, stack=stack, main=main, ended_ns=when_ns)
            if -code == signal.SIGBUS:
                with suppress(OSError):
                    exit_ = replace(exit_, shm_free=shutil.disk_usage("/dev/shm").free)
        if exit_.phase == "backward" and has_left_backward(exit_.main):
            exit_ = replace(exit_, phase="script")
        if exit_.phase == "script":
            exit_ = replace(exit_, after=self.ended_part(state.batch))
        if (times := self.steps.event(where)) is not None:
            messages.append(EventMessage(times))
        return [*messages, *self._history_of(reader, code, now), NodeBeat([state], {}), EventMessage(exit_)]

    def _of_this_rank(self, event: WorkerEvent) -> WorkerEvent:
        """What a process has recorded before it was known which rank it is, is this rank's."""
        where = event.where
        if (where.rank, where.attempt) == (self.rank, self.attempt):
            return event
        return replace(event, where=replace(where, rank=self.rank, attempt=self.attempt))

    def _look_back(
        self, reader: RecorderReader, header: tuple[int, ...], definitions: list[Definition], now: float
    ) -> list[AgentBody]:
        """The history's forecasts, and faults: it and the times of steps decide nothing, and all else goes on."""
        forecasts: list[LimitForecast] = []
        try:
            self.steps.read(reader, header)
        except Exception as error:
            self._failed("step times", error)
        try:
            if definitions:
                self._history.define(definitions)
            if not self.ended:
                self._history.read(reader, header, now)
                forecasts = self._history.told(self.rank, self.attempt)
                if forecasts:
                    self._forecasts += len(forecasts)
                    tell_forecasts(self._path, self._forecasts)
        except Exception as error:
            self._failed("history", error)
        if self._history.forecast_error is not None:
            self._failed("forecasts", self._history.forecast_error)
        return [*map(EventMessage, forecasts), *self._new_faults()]

    def _failed(self, part: str, error: Exception) -> None:
        """Report an error of ours that costs no frame, once for each part."""
        where = RunPosition(self.rank, self.attempt)
        self._faults.setdefault(part, OwnFault(where, part, f"{type(error).__name__}: {error}"))

    def _new_faults(self) -> list[EventMessage]:
        found = [EventMessage(fault) for fault in self._faults.values() if fault is not None]
        self._faults = dict.fromkeys(self._faults)
        return found

    def _history_of(self, reader: RecorderReader, code: int | None, now: float) -> list[AgentBody]:
        """What its steps led to, its history, and the pages that tell how the growth in front of its alarm began.

        Nobody needs the history of a rank that ended well, unless somebody asked for one of its batches.
        """
        found: list[AgentBody] = []
        is_wanted = code != 0 or self._asked
        try:
            if is_wanted:
                self._history.finish(reader)  # first: the steps are read from the same pages, and then from the others
            found += map(EventMessage, self._history.steps.finish(reader, self.rank, self.attempt))
            if is_wanted:
                found += self._history.messages(self.rank, self.attempt)
                found += self._pages_of_growth(reader, now)
        except Exception as error:
            self._failed("history", error)
        return [*found, *self._new_faults()]

    def _pages_of_growth(self, reader: RecorderReader, now: float) -> list[PageMessage]:
        """The pages in which outputs began to grow, and the two before: a weight may have been changed there."""
        if self._alarm is None:
            return []
        where = self._alarm.where
        place = split_label(where.root)
        root = next((number for number, of in reader.roots.items() if (of.cls, of.ordinal) == place), None)
        began = self._history.growth_began(root, where.batch) if root is not None else None
        if began is None:
            return []
        for batch in range(max(0, began - 2), began - 2 + GROWTH_PAGES):
            self._pages.want_at_once((*place, batch), now)
        return self._pages.due(reader, now)

    def _unlogged_anomaly(self, reader: RecorderReader) -> list[AgentBody]:
        """The anomaly of the recorder's header, where the log had no room for it or is damaged."""
        anomaly = reader.first_anomaly() if self._alarm is None else None
        if anomaly is None or (is_rank(self.rank) and self._of_this_rank(anomaly) is not anomaly):
            return []
        return [EventMessage(self._of_this_rank(anomaly))]

    def state(self) -> RankState | None:
        """Where the rank is, for a beat; None if that cannot be read."""
        timed, parts_us = self.steps.so_far
        state = self._read(RecorderReader.state, None)
        if state is None:
            return None
        loss, thinned = self._history.loss, self._pages.thinned
        state = replace(state, steps_timed=timed, parts_us=parts_us, traces_thinned=thinned, loss=loss)
        groups = self.groups() if state.age_s >= RESTS_S else []
        if not groups:
            return state
        waits = any(group.phase in ("issuing", "waiting") for group in groups)
        return replace(state, begun=max(groups, key=lambda group: group.size).begun, waits=waits)

    def _read(self, read: Callable[[RecorderReader], T], otherwise: T) -> T:
        if self._reader is not None and not self._broken:
            with suppress(OSError):  # the next `poll` reports it
                return read(self._reader)
        return otherwise

    def movement(self) -> tuple[int, ...]:
        """What changes when the rank moves; () without a recorder."""
        return self._read(RecorderReader.movement, ())

    def groups(self) -> list[GroupState]:
        """What the rank does in its process groups; [] if that cannot be read."""
        return self._read(RecorderReader.groups, [])

    def ended_part(self, batch: int) -> EndedPart:
        """What ended last in this batch, its last one, where its script is in none of its parts."""
        try:
            return self._read(lambda reader: ended_part(reader, batch), "")
        except Exception as error:  # the page is damaged
            self._failed("step position", error)
            return ""

    def timeout_s(self) -> float:
        """Of the process group in which it has waited for longest; of its default group if no table shows it waiting.

        0 where none is known.
        """
        inside = [group for group in self.groups() if group.phase in ("issuing", "waiting", "issued", "on_device")]
        longest = max(inside, key=lambda group: group.since_s, default=None)
        if longest is not None:
            return longest.timeout_s
        return self._read(lambda reader: abs(reader[HeadField.GROUP_TIMEOUT_MS]) / 1000, 0.0)

    def hottest(self) -> list[HotModule]:
        """Its modules that are closest to their limit; [] where that is not known."""
        try:
            return self._history.hottest(self.rank, MOST_HOT)
        except Exception as error:
            self._failed("hottest modules", error)
            return []

    def where(self, state: RankState) -> RunPosition:
        """The place of a state."""
        return RunPosition(self.rank, self.attempt, state.step, state.batch, seq=state.seq, time_ns=time.time_ns())

    @property
    def was_removed(self) -> bool:
        """Whether there is no recorder, or none any more."""
        return self._reader is None and not self._path.exists()

    def remove(self) -> None:
        """Free the recorder's memory."""
        self.close()
        folder = self._path.parent
        whose = folder, self.rank, self.attempt
        for path in (self._path, folder / stack_file_name(self.rank, self.attempt), pipe_of(*whose), file_of(*whose)):
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Let go of the recorder."""
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> RecorderReader | None:
        if self._reader is None:
            try:
                reader = RecorderReader(self._path, even_damaged=self._even_damaged)
            except (OSError, NotReady):
                return None
            if not is_rank(self.rank) and reader.pid == self.pid:
                reader.rank, reader.attempt = self.rank, self.attempt
            if (reader.rank, reader.attempt) != (self.rank, self.attempt):
                reader.close()
                raise ValueError(f"it claims to belong to rank {reader.rank}, attempt {reader.attempt}")
            self._reader = reader
        return self._reader
