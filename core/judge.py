"""What a frame's numbers mean: an alarm, expected, hidden by a rule, near overflow, underflow. The only rule.

`judge` is a pure function of a frame and of what its page has shown before it. It does not matter where the tensors
lay, whether the numbers were there at once or came a batch later, or which hook wrote the frame. Whether a bad value
has any effect on the training is decided later, by worker/record/held_alarms.py. Which value of a forward a call
around it has taken away is decided in bad_values.py.

Recorded, and no alarm:
- an optimizer's state beside the weight that it belongs to: it is shown because that weight is bad. In a frame of its
  own it is an alarm.
- an input: it may be a mask, or memory from `torch.empty`. If the call then returns something bad, that output is the
  alarm.
- -inf alone in an output, what masks are made of; except where a module computed it with weights of its own, and was
  not handed -inf or nan.
- an output that is one of the inputs, unchanged or written into: it has the same value (`Row.value`) as that input's
  row. If the input was finite when it was last seen, the call has changed it in place, and it is an alarm.
- a gradient that a GradScaler checks before it is used, and the loss that it has scaled.
- a gradient of a rehearsal, which nobody has written.
- a buffer, but for a norm's running statistics. What is made of another one is an alarm where it is seen.
- what a rule of the user's covers, and the same tensor in the calls that pass it on.
- a bad value that a call returns, for as long as the calls around it have not returned. If it leads to what the model
  returns, it is an alarm where it was made. If a call around it returns something that cannot come of it, it was
  absorbed: a softmax over rows that are masked whole, and a `masked_fill` behind it (bad_values.py).

A loss is an alarm if it is not finite, -inf included. A value that a module has returned comes before it. The exception
is an inf in float16: a script may have multiplied its loss by a scale of its own, as 70 by 1024, and the gradients are
made of the scale alone. They are alarms themselves if they are not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from functools import reduce
from operator import or_
from typing import NamedTuple

from .bad_values import NAMED_BY_SCRIPT as NAMED_BY_SCRIPT
from .bad_values import BadValue, BadValues
from .events.alarms import Anomaly, IssuedMoment, NotedCollective
from .events.looked_again import LookedAgain, OptimizerStep
from .events.run_position import RunPosition
from .frames import Frame, FramePhase, Page, Row, RowKind, RowMark
from .roles import GRADIENTS, RoleKind
from .values import DTYPE_MAX, NonFinite, name_of

FORWARDS = (FramePhase.FORWARD, FramePhase.RECOMPUTE)
"""Phases in which calls are made, each within another one."""
_ARGUMENTS = (RoleKind.INPUT, RoleKind.BEFORE)
"""What a call was handed, now or before it changed that."""
STATISTICS = ("running_mean", "running_var")
"""Buffers of a norm's running statistics. No inf or nan is meant there, as -inf is in the buffer of a mask."""
EXPECTED = RowMark.IGNORED | RowMark.SCALED | RowMark.REHEARSED


class WarningLimits(NamedTuple):
    """From where on a finite value is worth a warning."""

    near_overflow: float = 0.0
    """Powers of two below the dtype's largest number; 0: no warning."""
    underflow_share: float = 0.0
    """Share of subnormal elements, 0 to 1; 0 or 1: no warning."""


class FrameJudgement(NamedTuple):
    """What follows from one frame."""

    alarm: Row | None = None
    """The first alarm: of weights, then outputs, gradients, an optimizer's states, a norm's running statistics."""
    hidden: tuple[Row, ...] = ()
    """Non-finite rows that a rule of the user's covers."""
    scaled: Row | None = None
    """The first non-finite gradient that a GradScaler is to catch, or the loss that it has scaled."""
    warnings: tuple[tuple[str, Row], ...] = ()
    """(`near overflow`, `underflow`, or `zero` for a gradient that is exactly zero, row)"""
    of: Frame | None = None
    """The frame of the alarm, where that is an earlier one than the frame that was judged."""
    absorbed: tuple[BadValue, ...] = ()
    """What this call has taken away that calls inside of it have returned."""
    masks: tuple[Row, ...] = ()
    """Outputs of -inf alone, in a frame without an alarm."""


NO_LIMITS = WarningLimits()


def judge(
    frame: Frame, limits: WarningLimits = NO_LIMITS, waived: Set[int] = frozenset(), returned: Set[int] = frozenset()
) -> FrameJudgement:
    """Judge one frame.

    `waived`: values of the page that a rule covered where they were first returned. `returned`: values of the page
    that an earlier call has returned; a warning about them was given there. `PageSoFar` keeps both.
    """
    hidden: list[Row] = []
    masks: list[Row] = []
    scaled: Row | None = None
    warnings: list[tuple[str, Row]] = []
    of_loss = frame.phase == FramePhase.LOSS
    for row in frame.rows:
        if row.flags:
            if row.mark & RowMark.IGNORED and row.role_kind not in _ARGUMENTS:
                hidden.append(row)
            elif row.mark & RowMark.SCALED and (of_loss or row.role_kind in GRADIENTS) and scaled is None:
                scaled = row
            elif row.role_kind is RoleKind.OUTPUT and row.only_neginf and not of_loss:
                masks.append(row)
            elif of_loss and may_be_scaling(row) and limits.near_overflow > 0:
                warnings.append(("near overflow", row))
        elif row.value not in returned and not of_loss:
            kind = _warning(row, limits)
            if kind is not None:
                warnings.append((kind, row))
    alarm = _alarm(frame, waived)
    return FrameJudgement(alarm, tuple(hidden), scaled, tuple(warnings), masks=tuple(masks) if alarm is None else ())


def may_be_scaling(loss: Row) -> bool:
    """Whether the scale alone may have made a loss non-finite, which no gradient is made of."""
    return loss.dtype == "float16" and bool(loss.flags) and not loss.nan


class PageSoFar:
    """What the frames of a page have shown, in the order in which they were written. A fold around `judge`."""

    __slots__ = ("_at_once", "bad", "returned", "waived")

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        """A bad value is an alarm in the call that has made it, whatever becomes of it: `--sync`."""
        self.waived: set[int] = set()
        self.returned: set[int] = set()
        self.bad = BadValues()

    def judge(self, frame: Frame, limits: WarningLimits = NO_LIMITS) -> FrameJudgement:
        """Judge the next frame."""
        found = judge(frame, limits, self.waived, self.returned)
        for row in frame.outputs:
            if row.value >= 0 and (row.flags or row.headroom is not None):
                self.returned.add(row.value)
                if row.mark & RowMark.IGNORED:
                    self.waived.add(row.value)
        return self._decided(frame, found) if self.bad.undecided or found.alarm is not None else found

    def end(self) -> FrameJudgement:
        """No call of this forward returns any more: the alarm, if one is undecided."""
        return _with(FrameJudgement(), self.bad.end())

    def _decided(self, frame: Frame, found: FrameJudgement) -> FrameJudgement:
        """The judgement of a frame that decides undecided values of the calls inside it, or has a bad value itself."""
        if frame.phase not in FORWARDS:
            bad = self.bad.end()  # it came before
            return _with(found, bad) if bad is not None else found
        alarm = found.alarm
        if alarm is not None and all(row.finite for row in frame.outputs):
            return found  # a weight
        bad, taken = self.bad.returns(frame, alarm)
        if bad is None and self._at_once:
            bad = self.bad.end()
        return _with(found, bad)._replace(absorbed=taken)


def _with(found: FrameJudgement, bad: BadValue | None) -> FrameJudgement:
    return found._replace(alarm=bad.row, of=bad.frame) if bad is not None else found._replace(alarm=None)


def _alarm(frame: Frame, waived: Set[int]) -> Row | None:
    weights, outputs, gradients = frame.weights, frame.outputs, frame.gradients
    states = frame.states if not weights else []  # beside a weight they are evidence
    buffers = [row for row in frame.rows if row.role_kind is RoleKind.BUFFER and row.parsed_role.name in STATISTICS]
    if not any(row.flags for row in (*weights, *outputs, *gradients, *states, *buffers)):
        return None
    before = [row for row in frame.rows if row.role_kind is RoleKind.BEFORE]
    was_finite = {row.parsed_role.name for row in before if not row.flags and row.kind == RowKind.MEASURED}
    handed = {row.value for row in frame.inputs if row.value >= 0 and row.role not in was_finite}
    input_flags = reduce(or_, (row.flags for row in frame.inputs), 0)
    for row in (*weights, *outputs, *gradients, *states, *buffers):
        returned = row.role_kind is RoleKind.OUTPUT
        if not row.flags or row.mark & EXPECTED or (returned and (row.value in handed or row.value in waived)):
            continue
        # -inf of what a module with weights was handed may be no sign of an overflow; +inf times a weight is -inf, too
        of_mask = not weights or (input_flags and not input_flags & NonFinite.POSINF)
        if frame.phase == FramePhase.LOSS:
            if may_be_scaling(row):
                continue
        elif returned and row.only_neginf and of_mask:
            continue
        return row
    return None


def _warning(row: Row, limits: WarningLimits) -> str | None:
    if row.role_kind not in (RoleKind.OUTPUT, *GRADIENTS) or row.mark & (RowMark.IGNORED | RowMark.REHEARSED):
        return None
    if (
        limits.near_overflow > 0
        and row.headroom is not None
        and row.headroom <= limits.near_overflow
        and row.abs_max != DTYPE_MAX.get(row.dtype)  # what masks are filled with
        and not row.mark & RowMark.SCALED  # a GradScaler's scale grows until gradients overflow
    ):
        return "near overflow"
    share = limits.underflow_share
    if row.subnormals is None or not 0 < share < 1:
        return None
    if row.subnormals >= share:
        return "underflow"
    return "zero" if row.zeros == 1.0 and row.role_kind is RoleKind.GRAD_OUTPUT else None


class ZeroGradients:
    """Which gradients that are exactly zero were not so before: only those have vanished.

    A gradient is zero by design where the layer behind it begins at zero, such as LoRA's B. Zeros are counted in one of
    `every` batches, and this class hears only of a gradient that is all zero.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._last: dict[tuple[str, str, str], int] = {}

    def has_vanished(self, root: str, module: str, role: str, batch: int) -> bool:
        """Take in a gradient that is exactly zero in a counted batch. True if it was not zero when last counted."""
        key = (root, module, role)
        last, self._last[key] = self._last.get(key), batch
        if last is None:
            return batch >= self._every
        return batch - last > self._every


def first_alarm(frames: Iterable[Frame], excused: Set[tuple[str, str]] = frozenset()) -> tuple[Frame, Row] | None:
    """The first alarm of a page, in the order in which things happened.

    `excused`: (module, role) of what the rank itself has found to lead nowhere, which a page does not show.
    """
    page = PageSoFar()
    for frame in frames:
        found = page.judge(frame)
        at = found.of or frame
        if found.alarm is not None and (at.module, found.alarm.role) not in excused:
            return at, found.alarm
    found = page.end()
    return (found.of, found.alarm) if found.of is not None and found.alarm is not None else None


def first_expected_gradient(frames: Iterable[Frame]) -> tuple[Frame, Row] | None:
    """The first non-finite gradient of a page that a GradScaler was to catch."""
    return next(((frame, row) for frame in frames if (row := judge(frame).scaled) is not None), None)


def anomaly_of_page(page: Page, *, aborts: bool = False) -> Anomaly | None:
    """The anomaly in a page that nobody could judge while it was written; None if there is none."""
    found = first_alarm(sorted(page.frames, key=lambda frame: frame.index))
    return anomaly_of(page, *found, aborts=aborts) if found is not None else None


def anomaly_of(page: Page, frame: Frame, row: Row, *, aborts: bool = False, cause: str = "") -> Anomaly:
    """The event for one row of a page."""
    where = RunPosition(page.rank, page.attempt, page.step, page.batch, page.root, page.number, frame.seq)
    return anomaly_at(where, frame, row, aborts=aborts, cause=cause)


def anomaly_at(
    where: RunPosition,
    frame: Frame,
    row: Row,
    *,
    aborts: bool = False,
    cause: str = "",
    optimizer: OptimizerStep | None = None,
    again: LookedAgain | None = None,
    moments: Sequence[IssuedMoment] = (),
    collectives_before: Sequence[NotedCollective] = (),
    looks: bool = False,
) -> Anomaly:
    """The event for one row of a frame, at a place in the run."""
    return Anomaly(
        where=where,
        frame=frame.index,
        module=frame.module,
        cls=frame.cls,
        phase=frame.phase,
        role=row.role,
        value=name_of(NonFinite(row.flags)),
        dtype=row.dtype,
        shape=row.shape,
        inputs_finite=all(entry.finite for entry in frame.inputs),
        weights_finite=all(entry.finite for entry in frame.weights),
        aborts=aborts,
        cause=cause or ("not inspected: --every" if row.mark & RowMark.SKIPPED else ""),
        collectives=frame.collectives,
        optimizer=optimizer,
        again=again,
        moments=list(moments),
        collectives_before=list(collectives_before),
        looks=looks,
    )
