"""Where in a page the first non-finite value came from: pure, and about one rank only.

A frame that was handed a bad value is a carrier; the origin is a frame whose inputs and weights were finite and whose
output was not. Two rows of a page with the same value index are about the same tensor, so a bad input can be followed
back to the call that returned it, or found to have been made by the code between two calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.frames import Frame, Page, Row
from ..core.records import Anomaly
from ..core.values import NonFinite, name_of


@dataclass(frozen=True)
class Finding:
    """What one rank's page says of its first bad value."""

    rank: int
    attempt: int
    step: int
    batch: int
    root: str
    module: str
    cls: str
    phase: str
    """forward (an origin), weight or input (it was bad before the forward), collective (it may have come from another
    rank), carrier (its origin is not in the page)."""
    role: str
    value: str
    dtype: str
    shape: tuple[int, ...] | None
    seq: int
    frame: int
    between: tuple[str, str | None] | None = None
    from_page: bool = True

    @property
    def is_origin(self) -> bool:
        """The bad value was made here, out of finite ones."""
        return self.phase == "forward"


def from_event(anomaly: Anomaly) -> Finding:
    """All that can be said without the page: the first frame that the worker saw a bad value in."""
    if not anomaly.weights_finite:
        phase = "weight"
    elif not anomaly.inputs_finite:
        phase = "input" if anomaly.module == "" else "carrier"
    else:
        phase = "forward"
    return Finding(
        rank=anomaly.where.rank,
        attempt=anomaly.where.attempt,
        step=anomaly.where.step,
        batch=anomaly.where.batch,
        root=anomaly.where.root,
        module=anomaly.module,
        cls=anomaly.cls,
        phase=phase,
        role=anomaly.role,
        value=anomaly.value,
        dtype=anomaly.dtype,
        shape=tuple(anomaly.shape) if anomaly.shape is not None else None,
        seq=anomaly.where.seq,
        frame=anomaly.frame,
        from_page=False,
    )


def analyze(page: Page, anomaly: Anomaly) -> Finding:
    """Find the origin of the anomaly in its page; falls back on the event where the page has lost that frame."""
    frames = sorted(page.frames, key=lambda frame: frame.index)
    first = next((frame for frame in frames if frame.index == anomaly.frame), None)
    if first is None or page.lost_frames:
        return from_event(anomaly)
    return _explain(page, frames, first, anomaly)


def _explain(page: Page, frames: list[Frame], frame: Frame, anomaly: Anomaly) -> Finding:
    bad_weight = next((row for row in frame.weights if not row.finite), None)
    if bad_weight is not None:
        return _finding(page, frame, frame.module, frame.cls, "weight", bad_weight, anomaly)
    bad_output = next((row for row in frame.outputs if not row.finite and not row.only_neginf), None)
    bad_output = bad_output or next((row for row in frame.outputs if not row.finite), None)
    bad_input = _bad_input(frame, bad_output)
    if bad_input is not None:
        return _trace_input(page, frames, frame, bad_input, anomaly)
    if bad_output is None:  # the frame's own rows were lost
        return from_event(anomaly)
    last_child = _last_child(frames, frame)
    between: tuple[str, str | None] | None = (last_child.module, None) if last_child is not None else None
    return _finding(page, frame, frame.module, frame.cls, "forward", bad_output, anomaly, between)


def _bad_input(frame: Frame, bad_output: Row | None) -> Row | None:
    """The input to follow: the worst. A mask of -inf is one only if it explains what went out."""
    bad = [row for row in frame.inputs if not row.finite]
    worse = [row for row in bad if not row.only_neginf]
    if worse or not bad:
        return worse[0] if worse else None
    return bad[0] if bad_output is None or bad_output.nan or bad_output.only_neginf else None


def _trace_input(page: Page, frames: list[Frame], frame: Frame, bad: Row, anomaly: Anomaly) -> Finding:
    """Follow a bad input to the call that returned it, to the model's own input, or to the code in between."""
    producer = next(
        (
            earlier
            for earlier in reversed(frames)
            if earlier.index < frame.index and any(row.value == bad.value >= 0 for row in earlier.outputs)
        ),
        None,
    )
    if producer is not None:
        return _explain(page, frames, producer, anomaly)
    holder = _outermost_with_input(frames, frame, bad)
    if holder.parent is None:
        row = next((row for row in holder.inputs if row.value == bad.value), bad)
        return _finding(page, holder, holder.module, holder.cls, "input", row, anomaly)
    parent = _parent_frame(frames, holder)
    cls = parent.cls if parent is not None else "?"
    before = _previous_sibling(frames, holder)
    between = (before.module if before is not None else "", holder.module or holder.cls)
    seen = min((seq for seq in (frame.seq, anomaly.where.seq) if seq >= 0), default=-1)
    phase = "collective" if before is not None and 0 <= before.seq < seen else "forward"
    return _finding(page, holder, holder.parent, cls, phase, bad, anomaly, between)


def _finding(
    page: Page,
    frame: Frame,
    module: str,
    cls: str,
    phase: str,
    row: Row,
    anomaly: Anomaly,
    between: tuple[str, str | None] | None = None,
) -> Finding:
    return Finding(
        rank=page.rank,
        attempt=page.attempt,
        step=page.step,
        batch=page.batch,
        root=page.root,
        module=module,
        cls=cls,
        phase=phase,
        role=row.role,
        value=name_of(NonFinite(row.flags)),
        dtype=row.dtype,
        shape=tuple(row.shape) if row.shape is not None else None,
        # a call that went through collectives carries the number that it ended with; the value was seen before that
        seq=min((seq for seq in (frame.seq, anomaly.where.seq) if seq >= 0), default=-1),
        frame=frame.index,
        between=between,
    )


# Frames are in the order in which calls returned: a call's children are the run of deeper frames right before it.


def _last_child(frames: list[Frame], frame: Frame) -> Frame | None:
    previous = next((f for f in reversed(frames) if f.index < frame.index), None)
    return previous if previous is not None and previous.depth > frame.depth else None


def _previous_sibling(frames: list[Frame], frame: Frame) -> Frame | None:
    """The call of the same parent that returned last before this one began."""
    for earlier in reversed(frames):
        if earlier.index >= frame.index:
            continue
        if earlier.depth < frame.depth:
            return None
        if earlier.depth == frame.depth:
            return earlier
    return None


def _parent_frame(frames: list[Frame], frame: Frame) -> Frame | None:
    """The call around this one, if it had returned."""
    for later in frames:
        if later.index > frame.index and later.depth < frame.depth:
            return later if later.module == frame.parent else None
    return None


def _outermost_with_input(frames: list[Frame], frame: Frame, bad: Row) -> Frame:
    """The outermost call around `frame` that was handed the very same tensor."""
    holder = frame
    while (parent := _parent_frame(frames, holder)) is not None:
        if not any(row.value == bad.value >= 0 for row in parent.inputs):
            break
        holder = parent
    return holder
