"""The judge's caller: hands it each notable frame once its numbers are there, and writes down what follows.

A frame of host memory is judged as soon as it is written. One of a device is judged when its numbers have arrived, and
not before those of the frames in front of it: in whatever order they arrive, the same row is the first.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.errors import OverflowDetected
from ...core.exits import ExitCode
from ...core.frames import Frame, Row, module_text
from ...core.judge import Judgement, Limits, PageSoFar, anomaly_at
from ...core.recorder.layout import Field
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.writer import OpenPage
from ...core.records import Anomaly, Fault, Ignored, ScalerSkip, Warned
from ...core.text.shown import shown_name
from ...core.values import NonFinite, name_of
from ..stats.device_buffer import DeviceStatsBuffer
from ..stats.notable import near_by_encoding
from .page_filter import frames_to_judge
from .progress import Progress
from .rows import Rows

_MAX_ANOMALIES = 64
_MAX_WARNED = 256
_MAX_SCALED = 4096


class NonFiniteRow(NamedTuple):
    """One row of one frame, where something non-finite was seen."""

    page: OpenPage
    frame: Frame
    row: Row


class _PageJudged:
    """How far a page has been judged."""

    __slots__ = ("alarmed", "next", "so_far", "suspicious")

    def __init__(self) -> None:
        self.so_far = PageSoFar()
        self.alarmed = False
        """It has its anomaly: what comes after it in the same batch is its consequence."""
        self.next = 0
        """Index of the first frame that has not been judged."""
        self.suspicious = False
        """Something notable has arrived in it: a later frame may show the same value again."""


class Judging:
    """All judgements of a rank, and whether the job is to end."""

    def __init__(self, progress: Progress, rows: Rows) -> None:
        settings = progress.settings
        self._progress = progress
        self._recorder = progress.recorder
        self._fields = progress.fields
        self._rows = rows
        self._own = OwnPages(progress.recorder)
        self._limits = Limits(settings.near_overflow, settings.underflow_share)
        self.aborts = settings.on_overflow == "abort"
        """An overflow ends the job."""
        self.pending: Anomaly | None = None
        """Why the job is to end at the next place where it may."""
        self._anomalies = 0
        self._warned: set[tuple[str, str, str, str]] = set()
        self._hidden: set[tuple[str, str, str]] = set()
        self._scaled: list[NonFiniteRow] = []
        self._late: dict[int, OpenPage] = {}
        """Pages with numbers that have not arrived."""
        self._to_judge: set[int] = set()
        """Those of them in which something notable was seen."""
        self._noted = ""
        self._graphs_told = False
        rows.expect = self.expect
        rows.on_device_buffer = self._begin

    def _begin(self, buffer: DeviceStatsBuffer) -> None:
        buffer.near_bits = near_by_encoding(self._limits.near_overflow)
        buffer.underflow_share = self._limits.underflow_share

    # -- frames -------------------------------------------------------------------------------------------------

    def expect(self, page: OpenPage) -> None:
        """A value was written into a page whose numbers come later."""
        self._late[page.number] = page

    def suspects(self, page: OpenPage) -> bool:
        """Whether every further frame of a page is to be judged."""
        return page.judged is not None and _judged(page).suspicious

    def look(self, page: OpenPage, index: int) -> None:
        """Judge frame `index`, which has something notable in it; later, if numbers of its page are on their way."""
        if page.number in self._late:
            self._to_judge.add(page.number)
            self.collect()
            return
        frame = self._own.frame(page, index)
        if frame is not None:
            self._judge(page, _judged(page), frame)

    def forward_ends(self, page: OpenPage) -> None:
        """Judge what the native writer wrote since something notable arrived: it may show the same values again."""
        if self.suspects(page) and page.number not in self._late:
            self._advance(page, everything=True)

    def judge_again(self, page: OpenPage, index: int) -> Judgement:
        """What the judge says of one frame, taken by itself. Its numbers are there, and nothing follows from it."""
        frame = self._own.frame(page, index)
        return PageSoFar().judge(frame) if frame is not None else Judgement()

    def collect(self) -> bool:
        """Judge the frames whose numbers have arrived. True when nothing more is on its way. Does not wait."""
        buffer = self._rows.device_buffer
        if buffer is None:
            return True
        if buffer.note != self._noted:
            self._noted = buffer.note
            self._recorder.append(Fault(self._progress.where(), "device note", buffer.note))
        if buffer.not_seen_in_graphs and not self._graphs_told:
            self._graphs_told = True
            message = "graph: not seen. A CUDA graph was captured, and what its replays compute is not read"
            self._recorder.append(Fault(self._progress.where(), "graph", message))
        for number in buffer.collect():
            if number in self._late:
                self._to_judge.add(number)
                _judged(self._late[number]).suspicious = True
        arrived = {number for number in self._late if not buffer.pending(number)}
        for number in sorted(self._to_judge):
            page = self._late.get(number)
            if page is not None:
                self._advance(page, everything=number in arrived)
        for number in arrived:
            del self._late[number]
        self._to_judge &= self._late.keys()
        return not self._late

    def finish(self) -> None:
        """Wait for all numbers that are on their way, and judge them."""
        buffer = self._rows.device_buffer
        if buffer is not None and self._late:
            buffer.finish()
            self.collect()

    def _advance(self, page: OpenPage, *, everything: bool) -> None:
        """Go on in a page, up to the first frame whose numbers are on their way. What was lost will never come."""
        judged = _judged(page)
        notable, arguments = self._rows.notable.mask, self._rows.argument_slots
        found, end = frames_to_judge(self._own, page, judged.next, notable, arguments, everything=everything)
        for index in found:
            frame = self._own.frame(page, index)
            if frame is not None:
                self._judge(page, judged, frame)
        judged.next = max(judged.next, end)

    def _judge(self, page: OpenPage, judged: _PageJudged, frame: Frame) -> None:
        judged.next = frame.index + 1
        found = judged.so_far.judge(frame, self._limits)
        for row in found.hidden:
            self._hide(NonFiniteRow(page, frame, row))
        for kind, row in found.warnings:
            self._warn(kind, page, frame, row)
        if found.scaled is not None and len(self._scaled) < _MAX_SCALED:
            self._scaled.append(NonFiniteRow(page, frame, found.scaled))
        if found.alarm is not None:
            self.alarm(NonFiniteRow(page, frame, found.alarm))

    # -- non-finite ---------------------------------------------------------------------------------------------

    def alarm(self, bad: NonFiniteRow, cause: str = "") -> None:
        """The first bad value of a batch."""
        judged = _judged(bad.page)
        if judged.alarmed:
            return
        judged.alarmed = True
        where = self._progress.where_of(bad.page, bad.frame)
        anomaly = anomaly_at(where, bad.frame, bad.row, aborts=self.aborts, cause=cause)
        if anomaly.cause == "not looked into: --every" and not cause:
            anomaly = anomaly_at(
                where, bad.frame, bad.row, aborts=self.aborts, cause=f"{anomaly.cause} {self._progress.settings.every}"
            )
        self._anomalies += 1
        if self._anomalies <= _MAX_ANOMALIES:
            self._recorder.append(anomaly)
        else:  # training on with nan in every batch: the first ones are what the question is about
            self._fields[Field.RECORDS_LOST] += 1
        if anomaly.aborts and self.pending is None:
            self.pending = anomaly

    def _hide(self, bad: NonFiniteRow) -> None:
        """A row that a rule of the user's covers. Every one is counted, the first of each kind is an event."""
        self._fields[Field.IGNORED] += 1
        page, frame, row = bad
        root = self._recorder.names.root_label(page.root)
        key = (root, frame.module, row.role)
        if key not in self._hidden:
            self._hidden.add(key)
            rule = self._rows.rule_for(frame.module, row.role)
            where = self._progress.where_of(page, frame)
            self._recorder.append(Ignored(where, rule, frame.module, row.role, name_of(NonFinite(row.flags))))

    def take_scaled(self, step: int) -> NonFiniteRow | None:
        """The first bad gradient that a GradScaler was to catch before optimizer step `step`. Those are then done."""
        taken = [bad for bad in self._scaled if bad.page.step <= step]
        self._scaled = [bad for bad in self._scaled if bad.page.step > step]
        return taken[0] if taken else None

    def is_late(self, step: int) -> bool:
        """Whether numbers of a batch up to optimizer step `step` are on their way."""
        return any(page.step <= step for page in self._late.values())

    def skipped(self, bad: NonFiniteRow | None, scale: float, in_a_row: int) -> None:
        """Write down that a GradScaler has skipped a step because of `bad`."""
        where = self._progress.where_of(bad.page, bad.frame) if bad is not None else self._progress.where()
        if bad is None:
            self._recorder.append(ScalerSkip(where, scale, in_a_row))
            return
        value = name_of(NonFinite(bad.row.flags))
        frame = bad.frame
        self._recorder.append(ScalerSkip(where, scale, in_a_row, frame.module, frame.cls, bad.row.role, value))

    def raise_pending(self) -> None:
        """End the job, if that is what an anomaly asked for. Raises OverflowDetected."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._fields[Field.ABORT] = ExitCode.OVERFLOW
            raise OverflowDetected(sentence(pending))

    # -- close to it --------------------------------------------------------------------------------------------

    def _warn(self, kind: str, page: OpenPage, frame: Frame, row: Row) -> None:
        self._fields[Field.WARNED] += 1
        key = (kind, self._recorder.names.root_label(page.root), frame.module, row.role)
        if key in self._warned or len(self._warned) >= _MAX_WARNED:
            return
        self._warned.add(key)
        where = self._progress.where_of(page, frame)
        self._recorder.append(
            Warned(
                where,
                kind,
                frame.module,
                frame.cls,
                frame.phase,
                row.role,
                row.dtype,
                row.abs_max,
                row.headroom,
                row.zeros,
                row.subnormals,
            )
        )


def _judged(page: OpenPage) -> _PageJudged:
    judged = page.judged
    if judged is None:
        judged = page.judged = _PageJudged()
    assert isinstance(judged, _PageJudged)
    return judged


def sentence(anomaly: Anomaly) -> str:
    """What the failing rank says in its exception."""
    module = module_text(anomaly.module, anomaly.cls)
    cause = f" ({anomaly.cause})" if anomaly.cause else ""
    return (
        f"gpuwatch: rank {anomaly.where.rank}: {anomaly.value} in {shown_name(anomaly.role)} of {module}, "
        f"{anomaly.phase} of batch {anomaly.where.batch}{cause}; the combined report follows when all ranks have "
        "ended. To go on training after an overflow: --on-overflow continue"
    )
