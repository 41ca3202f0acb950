"""Calls the judge (core/judge.py) for each notable frame once its numbers are there, and records the result.

A notable frame of tensors in host memory is judged as it is written, or as its forward returns while an earlier value
of that is undecided. A frame of tensors on a device is judged when its numbers have arrived. The frames of a page are
judged in the order in which they were written, so the order of arrival does not change which row is the first alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import ParamSpec, TypeVar

from ...core.codes import Code, ExitCode, coded
from ...core.errors import OverflowDetected
from ...core.events.alarms import Anomaly, LedNowhere, ScalerSkip
from ...core.events.looked_again import LookedAgain, OptimizerStep
from ...core.events.own_limits import SELF_CHECK, OwnFault
from ...core.events.preflight_events import RankInventoryEvent
from ...core.events.run_position import RunPosition
from ...core.events.script_events import OverflowRaised
from ...core.frames import Frame, FramePhase, RowMark
from ...core.guest.tell import say
from ...core.judge import FORWARDS, NAMED_BY_SCRIPT, FrameJudgement, PageSoFar, WarningLimits, ZeroGradients, anomaly_at
from ...core.recorder.layout import HeadField, seal
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.writer import OpenPage
from ...core.roles import RoleKind
from ...core.signal_errors import from_outside
from ...core.values import NonFinite, name_of
from .collectives import moments
from .held_alarms import HeldAlarm, NonFiniteRow, TrainedModules
from .late_masks import LateMasks
from .notable import frames_to_judge
from .passed import LatePassed
from .progress import RunProgress
from .raised_overflow import clause_of, ends_by_another_watch, raised_text
from .rows import COUNT_EVERY, RowWriter
from .value_notices import ValueNotices
from .watch_pace import MOST

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MAX_ANOMALIES = 64
_MAX_SCALED = 4096
_MAX_MOMENTS = 128


@dataclass(slots=True, eq=False)
class _PageJudged:
    """How far a page has been judged."""

    so_far: PageSoFar
    forward_ended: bool = False
    """No call of its forward returns any more."""
    alarmed: bool = False
    """The page has its anomaly. Later alarms of the same batch are consequences of it."""
    next: int = 0
    """Index of the first frame that has not been judged."""
    suspicious: bool = False
    """Something notable was found in the page. A later frame may show the same value again."""


@dataclass(eq=False, repr=False)
class AlarmRecorder:
    """All judgements of a rank, and whether the job is to end."""

    _progress: RunProgress
    _rows: RowWriter
    passed: LatePassed
    masks: LateMasks
    _trained: TrainedModules
    has_run: InitVar[Callable[[int], bool]]
    """Whether a backward has reached the outputs of the root of the page with this number."""
    optimizer_of: Callable[[NonFiniteRow], OptimizerStep | None]
    """Finds the step that wrote a weight."""
    on_bad_weight: Callable[[OpenPage, Frame, str], None]
    """Called with (page, frame, role) for a weight that a step made non-finite, before its alarm is recorded."""
    look_again: Callable[[NonFiniteRow], LookedAgain | None]
    """Reads the module of the first alarm again."""
    on_first: Callable[[NonFiniteRow], None]
    """Called for the rank's first alarm."""
    on_end: Callable[[NonFiniteRow], bool]
    """Called for the alarm that ends the job."""
    conclude: Callable[[], str]
    """Called before the job ends: where the value was made, as a clause; "" if unknown."""

    def __post_init__(self, has_run: Callable[[int], bool]) -> None:
        settings = self._progress.settings
        self._recorder = self._progress.recorder
        self._fields = self._progress.fields
        self._own = OwnPages(self._recorder)
        self._sync = settings.sync
        self._limits = WarningLimits(settings.near_overflow, settings.underflow_share)
        self.aborts = settings.on_overflow == "abort"
        """An overflow ends the job."""
        self.pending: Anomaly | None = None
        """Why the job is to end at the next place where it may."""
        self.before_raise: Callable[[str], None] = lambda _: None
        """Called with what was found, before the exception that ends the job."""
        self._anomalies = 0
        self._has_raised = False
        self.first_alarmed = -1
        """Number of the page with the first alarm; -1 before it."""
        self._zeros = ZeroGradients(math.lcm(COUNT_EVERY, MOST if settings.every == "auto" else max(1, settings.every)))
        self._scaled: list[NonFiniteRow] = []
        self._late = self._rows.late_pages
        self._to_judge: set[int] = set()
        """Numbers of those pages in which something notable was found."""
        self._recorded_note = ""
        """The last note of the device buffer that was recorded."""
        self._graph_fault_recorded = False
        self._device_recorded = False
        self._notices = ValueNotices(self._progress, self._rows.rule_for)
        self.held = HeldAlarm(self._trained, self._progress, self.alarm, self._notices.led_nowhere, has_run)
        """The rows that raise no alarm yet; none with --sync."""

    # -- frames -------------------------------------------------------------------------------------------------

    def waits_for(self, page: int) -> bool:
        """Whether numbers of the page of this number are outstanding."""
        return page in self._late

    def suspects(self, page: OpenPage) -> bool:
        """Whether every further frame of a page must be judged."""
        if page.judged is None:
            return False
        judged = self._judged(page)
        return judged.suspicious or bool(judged.so_far.bad.undecided)

    def judge(self, page: OpenPage, index: int) -> None:
        """Judge the notable frame `index`: now, or when the outstanding numbers of its page have arrived."""
        # an earlier frame may still turn out bad, and this one only show the same value: all wait for the first
        if page.number in self._late:
            self._to_judge.add(page.number)
            self.collect()
            return
        judged, frame = self._judged(page), self._own.frame(page, index)
        if frame is None:
            return
        if not judged.so_far.bad.undecided:
            self._judge(page, judged, frame)
        elif self._sync or frame.phase not in FORWARDS:
            self._advance(page, everything=True)  # frames that the native writer wrote since come first
        # else it is judged when the forward returns, after the frames in front of it

    def forward_ends(self, page: OpenPage) -> None:
        """Decide the undecided values of a forward, or of a part that ran again, after it returned or raised.

        The native writer has written frames after a notable one: they may show the same values again.
        """
        late = page.number in self._late
        if page.judged is None and not late:
            return
        judged = self._judged(page)
        judged.forward_ended = True
        if not late:
            if self.suspects(page):
                self._advance(page, everything=True)
            self._decide(page, judged)

    def _decide(self, page: OpenPage, judged: _PageJudged) -> None:
        """Raise the alarm if the forward ended with an undecided value: it may have spread."""
        found = judged.so_far.end() if judged.forward_ended else None
        if found is not None and found.alarm is not None and found.of is not None:
            self.alarm(NonFiniteRow(page, found.of, found.alarm))

    def judge_again(self, page: OpenPage, index: int) -> FrameJudgement:
        """Judge one frame by itself, without recording anything. Its numbers must have arrived."""
        frame = self._own.frame(page, index)
        return PageSoFar().judge(frame) if frame is not None else FrameJudgement()

    def _judged(self, page: OpenPage) -> _PageJudged:
        judged = page.judged
        if judged is None:
            judged = page.judged = _PageJudged(PageSoFar(at_once=self._sync))
        assert isinstance(judged, _PageJudged)
        return judged

    def collect(self) -> bool:
        """Judge the frames whose numbers have arrived. True when no number is outstanding. Does not wait."""
        with self._progress.lock:
            return self._collect()

    def _collect(self) -> bool:
        buffer = self._rows.device_buffer
        unseen = self._rows.captured_unseen or (buffer is not None and buffer.not_seen_in_graphs > 0)
        if unseen and not self._graph_fault_recorded:
            self._graph_fault_recorded = True
            why = buffer.why_not_seen if buffer is not None else ""
            message = "not seen. A CUDA graph was captured, and gpuwatch does not read all that its replays compute"
            message += f": {why or 'it was captured before a tensor on the device was read'}"
            self._recorder.append(OwnFault(self._progress.where(), "graph", message))
        if buffer is None:
            return True
        if not self._device_recorded:  # the inventory of a preflight, which has more, is not replaced
            self._device_recorded = True
            self._recorder.append(RankInventoryEvent(self._progress.where(), str(buffer.device), {}))
        if buffer.note != self._recorded_note:
            self._recorded_note = buffer.note
            self._recorder.append(OwnFault(self._progress.where(), "device note", buffer.note))
        while buffer.faults:
            fault = buffer.faults.pop(0)
            self._recorder.append(OwnFault(self._progress.where(), SELF_CHECK, fault))
            say(coded(f"rank {self._progress.rank}: {fault}", Code.READER_OFF))
        self.passed.collect()
        for number in buffer.collect():
            if number in self._late:
                self._to_judge.add(number)
                self._judged(self._late[number]).suspicious = True
                self.masks.learn(self._own, self._late[number])
        self._to_judge |= {number for number, page in self._late.items() if self.suspects(page)}
        arrived = {number for number in self._late if not buffer.pending(number)}
        # in the order of the pages, and not of arrival: the first alarm of the run must not depend on streams
        for number in sorted(self._to_judge):
            page = self._late.get(number)
            if page is not None:
                self._advance(page, everything=number in arrived)
                if number in arrived:
                    self._decide(page, self._judged(page))
        for number in arrived:
            del self._late[number]
        self._to_judge &= self._late.keys()
        return not self._late

    def finish(self) -> None:
        """Wait for all outstanding numbers and judge them."""
        buffer = self._rows.device_buffer
        if buffer is not None and self._late:
            with self._progress.lock:
                buffer.finish()
                self._collect()

    def _advance(self, page: OpenPage, *, everything: bool) -> None:
        """Judge the next frames of a page, up to the first one with outstanding numbers.

        `everything`: no number of the page is outstanding, so those that are still missing were lost.
        """
        judged = self._judged(page)
        bad = judged.so_far.bad
        around_is_known = False
        while not around_is_known:
            around_is_known = True
            undecided = {each.within.index for each in bad.undecided}
            notable, slots = self._rows.notable.rows, self._rows.argument_slots
            found, end = frames_to_judge(self._own, page, judged.next, notable, slots, undecided, everything=everything)
            for index in found:
                frame = self._own.frame(page, index)
                if frame is None:
                    continue
                self._judge(page, judged, frame)
                if any(each.within is frame for each in bad.undecided) and all(row.finite for row in frame.outputs):
                    around_is_known = False  # its results decide nothing: the call around it does
                    break
        judged.next = max(judged.next, end)

    def _judge(self, page: OpenPage, judged: _PageJudged, frame: Frame) -> None:
        judged.next = frame.index + 1
        found = judged.so_far.judge(frame, self._limits)
        for row in found.hidden:
            self._notices.hide(NonFiniteRow(page, frame, row))
        for kind, row in found.warnings:
            if kind == "zero":
                root = self._recorder.names.root_label(page.root)
                if not self._zeros.has_vanished(root, frame.module, row.role, page.batch):
                    continue
                kind = "underflow"
            self._notices.warn(kind, page, frame, row)
        if found.scaled is not None:
            self._notices.out_of_line(name_of(NonFinite(found.scaled.flags)), page, frame, found.scaled)
            if len(self._scaled) < _MAX_SCALED:
                self._scaled.append(NonFiniteRow(page, frame, found.scaled))
        for bad in found.absorbed:
            why: LedNowhere = "" if bad.out_of_mask else "taken away"
            self._notices.led_nowhere(NonFiniteRow(page, bad.frame, bad.row), why, frame.module)
        for row in found.masks:
            self._notices.mask(NonFiniteRow(page, frame, row))
        if found.alarm is not None:
            bad_row = NonFiniteRow(page, found.of or frame, found.alarm)
            if not judged.alarmed and self._is_held_back(bad_row, frame):
                return
            if frame.phase == FramePhase.OPTIMIZER and found.of is None and not judged.alarmed:
                where = self._progress.where_of(page, frame)
                self._asked("the weights of a step", where, self.on_bad_weight, page, frame, found.alarm.role)
            self.alarm(bad_row)

    def _is_held_back(self, bad: NonFiniteRow, decided_by: Frame) -> bool:
        """Whether it leads nowhere, as far as is known now."""
        if self._sync:
            return False
        if bad.row.role_kind is RoleKind.WEIGHT and all(row.finite for row in bad.frame.outputs):
            raised = decided_by.phase in FORWARDS and not decided_by.outputs
            return not raised and self.held.weight(bad)
        if decided_by.phase == FramePhase.FORWARD and decided_by.parent is None and decided_by.cls != NAMED_BY_SCRIPT:
            return self.held.returned(bad, decided_by)
        return False

    # -- non-finite ---------------------------------------------------------------------------------------------

    def alarm(self, bad: NonFiniteRow, cause: str = "") -> None:
        """Record the first alarm of a page, and no later one."""
        judged = self._judged(bad.page)
        if judged.alarmed:
            return
        judged.alarmed = True
        earlier = self.held.cause_of(bad)
        if earlier is not None:
            self.alarm(earlier)
        if not cause and bad.row.mark & RowMark.SKIPPED:
            cause = f"not inspected: --every {self._progress.settings.every}"
        where = self._progress.where_of(bad.page, bad.frame)
        stepped = (
            self._asked("the step of a weight", where, self.optimizer_of, bad)
            if bad.frame.phase == FramePhase.OPTIMIZER
            else None
        )
        again, noted = None, None
        if not self._anomalies:
            noted = self._asked("process groups", where, self._progress.groups.last_collectives)
            self.first_alarmed = bad.page.number
            again = self._asked("a second look", where, self.look_again, bad)
            self._asked("data loaders", where, self.on_first, bad)
        ends = self.aborts and self.pending is None
        anomaly = anomaly_at(
            where,
            bad.frame,
            bad.row,
            looks=ends and bool(self._asked("a second run", where, self.on_end, bad)),
            aborts=self.aborts,
            cause=cause,
            optimizer=stepped,
            again=again,
            moments=moments(_MAX_MOMENTS, where.seq) if not self._anomalies else (),
            collectives_before=noted or (),
        )
        self._notices.out_of_line(name_of(NonFinite(bad.row.flags)), *bad)
        self._anomalies += 1
        if self._anomalies <= _MAX_ANOMALIES:
            self._recorder.append(anomaly)
        else:  # the training goes on with nan in every batch: only the first anomalies matter
            self._fields[HeadField.RECORDS_LOST] += 1
        if ends:
            self.pending = anomaly

    def _asked(
        self, what: str, where: RunPosition, ask: Callable[_P, _T], *args: _P.args, **named: _P.kwargs
    ) -> _T | None:
        """A worker part's facts about an alarm at `where`. If it fails, the alarm is recorded without them."""
        try:
            return ask(*args, **named)
        except Exception as error:
            if from_outside(error):
                raise
            message = f"the alarm is recorded without it: {type(error).__name__}: {error}"
            self._recorder.append(OwnFault(where, what, message))
            return None

    def take_scaled(self, step: int) -> NonFiniteRow | None:
        """The first bad gradient that a GradScaler was to catch up to optimizer step `step`. Forgets all of them."""
        taken = [bad for bad in self._scaled if bad.page.step <= step]
        self._scaled = [bad for bad in self._scaled if bad.page.step > step]
        return taken[0] if taken else None

    def is_late(self, step: int) -> bool:
        """Whether numbers of a batch up to optimizer step `step` are outstanding."""
        return any(page.step <= step for page in self._late.values())

    def skipped(self, bad: NonFiniteRow | None, scale: float, in_a_row: int) -> None:
        """Record that a GradScaler has skipped a step because of `bad`."""
        where = self._progress.where_of(bad.page, bad.frame) if bad is not None else self._progress.where()
        if bad is None:
            self._recorder.append(ScalerSkip(where, scale, in_a_row))
            return
        value = name_of(NonFinite(bad.row.flags))
        frame = bad.frame
        self._recorder.append(ScalerSkip(where, scale, in_a_row, frame.module, frame.cls, bad.row.role, value))

    def finish_and_raise(self, part: str) -> None:
        """`--sync`: wait for the numbers that a hook of this part has just read. May raise OverflowDetected."""
        with self._progress.faults.within(part):
            self.finish()
        self.raise_pending()

    def raise_pending(self) -> None:
        """Raise OverflowDetected if an anomaly is to end the job."""
        # taken out first: a script that catches it may go on, and it must not be raised again
        pending, self.pending = self.pending, None
        if pending is not None:
            where = self._progress.where()
            # the one second run is about the first of them: a script may have caught that
            ran = self._asked("a second run", where, self.conclude) if not self._has_raised else None
            found = clause_of(pending, ran or "")
            self._fields[HeadField.ABORT] = seal(ExitCode.OVERFLOW)
            self._asked("log_to", where, self.before_raise, found)
            if ends_by_another_watch():
                return
            if not self._has_raised:
                self._has_raised = True
                self._recorder.append(OverflowRaised(where))
            text = raised_text(found, launched=bool(self._progress.settings.recorder_dir))
            raise OverflowDetected(self._progress.in_users_words(text))
