"""One rank's diagnosis as a value: where its first non-finite value was made, or why that is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...core.events.alarms import Anomaly, IssuedMoment
from ...core.events.definitions import split_label
from ...core.events.looked_again import LookedAgain
from ...core.events.run_position import RunPosition
from ...core.frames import Frame, FramePhase, Page, Row, RowKind, format_number, module_text
from ...core.roles import RoleKind, parse_role
from ...core.values import NonFinite, name_of
from ..report.verdict import SeenIn
from .diagnosis_parts import BadRow, MaskEvidence, PassageEvidence, PossibleMakers, WeightEvidence

Source = Literal[
    "made", "outside", "changed", "weight", "unread", "skipped", "reduced", "received", "carried", "left", "buffer"
]
"""How the value reached the place that a diagnosis names.

made        that place made it from finite values
outside     the model, or its backward, received it
changed     a weight was changed outside of forward, backward and step
weight      it is in a weight, and no frame shows how it got there
unread      that place returned it for finite inputs, and its weights were not read
skipped     `--every` skipped that batch
reduced     this rank's own gradient was finite, and the one that the optimizer got was not
received    collectives ran there, so any rank may have sent it
carried     that place received it, and no frame shows its maker
buffer      a buffer of the module held it before the forward
left        a parameter's gradient held it before the backward that added to that gradient began
"""


@dataclass(frozen=True)
class LocalDiagnosis:
    """Where one rank's first non-finite value came from: the batch, the place to blame, the evidence."""

    rank: int
    attempt: int
    step: int
    batch: int
    root: str
    module: str
    cls: str
    phase: FramePhase
    """As in report.json. That of `row` may be another: a bad weight may show in a forward."""
    source: Source
    role: str
    row: BadRow
    issued: IssuedMoment
    """What the rank had issued when the value was seen."""
    between: tuple[str, str | None] | None = None
    sure: bool = True
    """False: the page leaves another explanation open."""
    from_page: bool = True
    weight: WeightEvidence = field(default_factory=WeightEvidence)
    makers: PossibleMakers = field(default_factory=PossibleMakers)
    mask: MaskEvidence = field(default_factory=MaskEvidence)
    passage: PassageEvidence = field(default_factory=PassageEvidence)
    bad_buffers: tuple[str, ...] = ()
    """Buffers of the alarm's module that were not finite: `buffer inv_freq of `rotary` (Rotary)`."""
    cause: str = ""
    notes: tuple[str, ...] = ()
    """Further evidence."""

    @property
    def own_role(self) -> str | None:
        """The role, if it is one of `module`'s own rows; None if the value was first seen in a row of another module.

        What the code of `attn` makes between two calls is first seen in `input[0]` of `attn.c_proj`.
        """
        return self.role if self.module == self.row.module or self.role != self.row.role else None

    @property
    def shown_by(self) -> SeenIn | None:
        """The row of another module in which the value was first seen; None if it is `module`'s own."""
        return SeenIn(self.row.module, self.row.cls, self.row.role) if self.own_role is None else None

    @property
    def place(self) -> str:
        """The module, for a sentence."""
        return module_text(self.module, self.cls) if self.row.phase != FramePhase.LOSS else "the loss"

    @property
    def text(self) -> str:
        """What was found, and in which row: `nan in output of `fc` (Linear)`.

        If no row of the named module holds the value, the text names the row that does: `nan in input[0] of
        `attn.c_proj` (Linear), made in `attn` (Attention)'s own code`.
        """
        row = self.row
        if row.phase == FramePhase.LOSS:
            return f"{row.value} in the loss"
        if self.own_role is not None:
            return f"{row.value} in {self.own_role} of {self.place}"
        text = f"{row.value} in {row.role} of {row.place}"
        if self.source == "outside":
            return f"{text}, from outside the model"
        code = "backward" if row.phase == FramePhase.BACKWARD else "own code"
        return f"{text}, {'made' if self.source == 'made' else 'passed on'} in {self.place}'s {code}"

    @property
    def is_origin(self) -> bool:
        """`module` made the value, out of finite ones."""
        return self.source == "made"


@dataclass(frozen=True)
class AlarmPage:
    """The page in which a rank has raised its alarm."""

    page: Page
    anomaly: Anomaly
    frames: list[Frame]
    """Those of the page, by index."""
    earlier: Sequence[Page] = ()
    """Earlier pages of the same root, latest first; they show which values are new in this one."""

    @property
    def again(self) -> LookedAgain:
        """Findings of the second look at the alarm's module; empty if there was none."""
        return self.anomaly.again or LookedAgain()

    @property
    def root_class(self) -> str:
        """Class of the model whose batch it is."""
        return split_label(self.page.root)[0]

    def is_about(self, frame: Frame, row: Row) -> bool:
        """Whether the alarm was raised for this very row."""
        return (self.anomaly.frame, self.anomaly.module, self.anomaly.role) == (frame.index, frame.module, row.role)

    def left_before(self, frame: Frame, row: Row) -> LocalDiagnosis | None:
        """The diagnosis of the alarm's gradient, if it was not finite before its backward began; else None."""
        is_left = self.again.left and self.is_about(frame, row)
        return self.diagnosis(frame, row, "left", FramePhase.BACKWARD) if is_left else None

    def diagnosis(
        self,
        frame: Frame,
        row: Row,
        source: Source,
        phase: FramePhase,
        *,
        place: tuple[str, str] | None = None,
        role: str = "",
        between: tuple[str, str | None] | None = None,
        sure: bool = True,
        notes: Iterable[str] = (),
        weight: WeightEvidence | None = None,
        makers: PossibleMakers | None = None,
        mask: MaskEvidence | None = None,
        proved: bool = False,
    ) -> LocalDiagnosis:
        """The diagnosis from one row of the page. Its place, (module, class), is that row's unless given."""
        page, anomaly, again = self.page, self.anomaly, self.again
        module, cls = place or (frame.module, frame.cls)
        if source == "received":
            phase = FramePhase.COLLECTIVE
        # where the graph tells who is behind a value, an attribute may only have kept it afterwards
        is_forward = phase == FramePhase.FORWARD and not again.own_code
        held = is_forward and any(each.module != module for each in again.held)
        may_be_elsewhere = bool(again.changed) or again.threads or held
        # a frame carries the number at its call's end; the value was seen before that
        seq = min((seq for seq in (frame.seq, anomaly.where.seq) if seq >= 0), default=-1)
        # what the rank had issued at that number; if nobody knows that, when the alarm was raised
        then = next((moment for moment in anomaly.moments if moment.seq == seq), anomaly.where)
        shape = tuple(row.shape) if row.shape is not None else None
        value = name_of(NonFinite(row.flags))
        return LocalDiagnosis(
            rank=page.rank,
            attempt=page.attempt,
            step=page.step,
            batch=page.batch,
            root=page.root,
            module=module,
            cls=cls,
            phase=phase,
            source=source,
            role=role or row.role,
            row=BadRow(frame.module, frame.cls, row.role, frame.phase, frame.index, value, row.dtype, shape),
            issued=_issued(then, seq),
            between=between,
            sure=sure and not (source == "made" and may_be_elsewhere),
            weight=replace(weight or WeightEvidence(), others_changed=bool(again.changed)),
            makers=makers or PossibleMakers(),
            mask=mask or MaskEvidence(),
            passage=PassageEvidence(proved=proved),
            bad_buffers=tuple(_buffers(anomaly, again)),
            cause=anomaly.cause,
            notes=(*notes, *_around(anomaly, again, phase)),
        )


def _issued(then: RunPosition | IssuedMoment, seq: int) -> IssuedMoment:
    return IssuedMoment(seq, then.clock, then.sent, then.received)


def quoted(module: str) -> str:
    """The module's name in a sentence."""
    return f"`{module}`" if module else "the root module"


def number_text(number: float | None) -> str:
    """`6.20e+04`; `-` if it is unknown."""
    return format_number(number).strip()


def rows_in(frames: Iterable[Frame], phase: FramePhase, like: Frame, role: str, *, before: bool = False) -> list[Row]:
    """The measured rows of a role in the frames of a phase that are of the same module as the frame `like`.

    `before`: those before that frame alone.
    """
    return [
        row
        for frame in frames
        if frame.phase == phase and frame.module == like.module and (frame.index < like.index or not before)
        for row in frame.rows
        if row.role == role and row.kind == RowKind.MEASURED
    ]


def _around(anomaly: Anomaly, again: LookedAgain, phase: FramePhase) -> list[str]:
    """What a second look at the module of an alarm has found beside its weights."""
    found = []
    # the scale that gradients had from a GradScaler may be the only reason why they were inf
    is_scaled = phase in (FramePhase.LOSS, FramePhase.BACKWARD, FramePhase.COLLECTIVE, FramePhase.OPTIMIZER)
    if again.loss_scale is not None and is_scaled:
        scale = f"{again.loss_scale:g} when the alarm was raised"
        found.append(f"a GradScaler had scaled the loss; its scale was {scale}")
    if again.threads:
        found.append(
            "modules were called in another thread within that forward, and have no frames: one can have made it"
        )
    found += [f"{name} is {value}" for name, value in _buffers(anomaly, again).items()]
    if again.element:
        found.append(f"not finite there: {again.element}")
    if again.update:
        found.append(f"the step for its first bad element: {again.update}")
    for each in again.bad_before:
        place = module_text(each.module, each.cls)
        found.append(f"buffer {each.name} of {place} was not finite before the forward: {each.value}")
    for each in again.held:
        found.append(f"attribute {each.name} of {module_text(each.module, each.cls)} holds {each.value}")
    found += [f"changed since it was last read, and not by a recorded step: {text}" for text in again.changed]
    if again.autocast:
        found.append(f"autocast was on: {again.autocast}")
    # of a weight that a step has made bad it would be that very step, which is told where it matters
    if again.optimizer is not None and "lr" in again.optimizer.settings and phase is not FramePhase.OPTIMIZER:
        name = again.optimizer.cls.rpartition(".")[2]
        found.append(f"the last step before was by {name}, learning rate {again.optimizer.settings['lr']:g}")
    return found


def _buffers(anomaly: Anomaly, again: LookedAgain) -> dict[str, str]:
    place = module_text(anomaly.module, anomaly.cls)
    return {f"buffer {name} of {place}": value for name, value in again.buffers.items()}


def from_event(anomaly: Anomaly) -> LocalDiagnosis:
    """The diagnosis without the page: what the worker's event says of the first frame with a non-finite value."""
    where, module, cls, role = anomaly.where, anomaly.module, anomaly.cls, anomaly.role
    shape = tuple(anomaly.shape) if anomaly.shape is not None else None
    found = LocalDiagnosis(
        rank=where.rank,
        attempt=where.attempt,
        step=where.step,
        batch=where.batch,
        root=where.root,
        module=module,
        cls=cls,
        phase=FramePhase.FORWARD if anomaly.phase == FramePhase.RECOMPUTE else anomaly.phase,
        source="made",
        role=role,
        row=BadRow(module, cls, role, anomaly.phase, anomaly.frame, anomaly.value, anomaly.dtype, shape),
        issued=_issued(where, where.seq),
        from_page=False,
        cause=anomaly.cause,
    )
    if is_skipped(anomaly):
        return replace(found, source="skipped")
    if anomaly.phase == FramePhase.COLLECTIVE:
        return replace(found, source="reduced")
    if anomaly.phase == FramePhase.BUFFER:
        return replace(found, source="buffer")
    if anomaly.phase == FramePhase.LOSS:
        return replace(found, source="outside", sure=False)
    kind = parse_role(anomaly.role).kind
    if anomaly.phase == FramePhase.BACKWARD and kind is RoleKind.GRAD_OUTPUT:
        # its user made it, and only the page shows the users
        root_class = split_label(anomaly.where.root)[0]
        return replace(found, module="", cls=root_class, between=("", anomaly.module), sure=False)
    if anomaly.phase == FramePhase.BACKWARD or (anomaly.phase == FramePhase.OPTIMIZER and kind is RoleKind.STATE):
        return replace(found, sure=False)
    # a gradient may have been non-finite before the step
    if anomaly.phase == FramePhase.OPTIMIZER or not anomaly.weights_finite:
        return replace(found, phase=FramePhase.WEIGHT, source="weight")
    if not anomaly.inputs_finite:
        is_root = anomaly.module == "" and anomaly.phase == FramePhase.FORWARD
        return replace(found, phase=FramePhase.INPUT, source="outside") if is_root else replace(found, source="carried")
    if anomaly.collectives:
        return replace(found, phase=FramePhase.COLLECTIVE, source="received")
    return found


def is_skipped(anomaly: Anomaly) -> bool:
    """`--every` skipped this batch: only the root's output was read."""
    return anomaly.cause.startswith(("not inspected", "not looked into"))  # the words until November 2026
