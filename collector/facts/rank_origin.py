"""One rank's diagnosis: where its first non-finite value came from. Pure; called once per rank.

A forward (forward_origin.py), a backward (backward_origin.py), a loss (loss_origin.py) and a step (step_origin.py) have
rules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.events.alarms import Anomaly
from ...core.frames import Frame, FramePhase, Page, Row, module_text
from ...core.judge import first_expected_gradient
from .backward_origin import explain_gradient
from .calls import common
from .diagnosis import AlarmPage, LocalDiagnosis, from_event, is_skipped
from .diagnosis_parts import PossibleMakers
from .forward_origin import explain_forward
from .loss_origin import explain_loss
from .step_origin import explain_reduced, explain_step


def diagnose(anomalies: Sequence[Anomaly], pages: Mapping[int, Page]) -> LocalDiagnosis | None:
    """The diagnosis of a rank's first anomaly, from its page if that was received; None if the rank had none.

    `anomalies` are in the order in which they happened; `pages` are the rank's pages by number.
    """
    if not anomalies:
        return None
    page = pages.get(anomalies[0].where.page)
    if page is None:
        return from_event(anomalies[0])
    earlier = [found for found in pages.values() if found.root == page.root and found.number < page.number]
    return origin_in_page(page, anomalies[0], sorted(earlier, key=lambda found: -found.number))


def origin_in_page(page: Page, anomaly: Anomaly, earlier: Sequence[Page] = ()) -> LocalDiagnosis:
    """The origin of an anomaly in its page. If the page has lost that frame, the event alone is diagnosed.

    `earlier` are earlier pages of the same root, latest first; they show which values are new in this one.
    """
    alarm = AlarmPage(page, anomaly, sorted(page.frames, key=lambda frame: frame.index), earlier)
    first = next((frame for frame in alarm.frames if frame.index == anomaly.frame), None)
    if first is None or page.lost_frames or is_skipped(anomaly):
        return from_event(anomaly)
    if anomaly.cause.startswith("GradScaler"):  # it had skipped too many steps for non-finite gradients
        expected = first_expected_gradient(alarm.frames)
        return _of_backward(alarm, *expected) if expected is not None else from_event(anomaly)
    if first.phase in (FramePhase.FORWARD, FramePhase.RECOMPUTE):
        made = _by_another_way(explain_forward(alarm, first), alarm, first)
        return _of_buffer(made, alarm) if made.source in ("made", "unread") else made
    row = next((row for row in first.rows if row.role == anomaly.role and not row.finite), None)
    if row is None:  # its own rows were lost
        return from_event(anomaly)
    if first.phase == FramePhase.BUFFER:
        return alarm.diagnosis(first, row, "buffer", FramePhase.BUFFER)
    if first.phase != FramePhase.OPTIMIZER:
        return _of_backward(alarm, first, row)
    found = explain_step(alarm, first, row)
    return found if isinstance(found, LocalDiagnosis) else _of_backward(alarm, *found)


def _of_backward(alarm: AlarmPage, frame: Frame, row: Row) -> LocalDiagnosis:
    if frame.phase == FramePhase.LOSS:
        return explain_loss(alarm, frame, row)
    if frame.phase != FramePhase.COLLECTIVE:
        return explain_gradient(alarm, frame, row)
    found = explain_reduced(alarm, frame, row)
    if isinstance(found, LocalDiagnosis):
        return found
    first = _of_backward(alarm, *found)
    without = "the optimizer was called without it: scaler.step(optimizer) skips that step"
    return replace(first, notes=(*first.notes, f"a GradScaler should have caught it, but {without}"))


def _by_another_way(found: LocalDiagnosis, alarm: AlarmPage, first: Frame) -> LocalDiagnosis:
    """Correct the place that frames name as the maker of a value in a forward, if autograd's graph contradicts it.

    No frame shows a value that a module hands on by an attribute, a list or a closure, so that the module which reads
    it looks like its maker. Among several candidates, the one whose attribute held the value is named.
    """
    again = alarm.anomaly.again
    if again is None or found.source != "made" or found.row.frame != first.index:
        return found
    values = {row.role: row.value for row in first.rows}
    makers = {each.module: each for each in again.own_code}
    if not makers.keys() - {found.module} or values.get(again.own_code_of) != values.get(found.row.role):
        return found
    holders = makers.keys() & {each.module for each in again.held}
    own_code = tuple(holders) if len(holders) == 1 else tuple(makers)
    scope = common(list(own_code))
    classes = {frame.module: frame.cls for frame in alarm.frames} | {name: each.cls for name, each in makers.items()}
    others = (each for each in makers.values() if each.module != found.module)
    text = "in autograd's graph it depends on {} of {}, with no frame in between"
    notes = [text.format(each.op, module_text(each.module, each.cls)) for each in others]
    return replace(
        found,
        module=scope,
        cls=classes.get(scope, "?"),
        role=found.row.role,
        between=None,
        sure=False,
        makers=PossibleMakers(own_code=own_code),
        notes=(*found.notes, *notes),
    )


def _of_buffer(found: LocalDiagnosis, alarm: AlarmPage) -> LocalDiagnosis:
    """Blame a buffer that was bad before the forward for what code of its own module has made."""
    held = next((each for each in alarm.again.bad_before if each.module == found.module), None)
    if held is None:
        return found
    role = f"buffer {held.name}"
    return replace(
        found,
        phase=FramePhase.BUFFER,
        source="buffer",
        role=role,
        row=replace(found.row, module=found.module, cls=found.cls, role=role, value=held.value, shape=None),
        between=None,
        makers=PossibleMakers(),
        notes=(f"first seen in the forward: {found.text}", *found.notes),
    )
