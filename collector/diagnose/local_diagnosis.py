"""One rank's diagnosis as a value: where its first non-finite value was made, or why that is unknown."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ...core.frames import Frame, Page, Row, module_text
from ...core.records import Anomaly, LookedAgain, Moment, Where, split_label
from ...core.roles import RoleKind, parse_role
from ...core.values import NonFinite, name_of

Source = Literal["made", "outside", "changed", "weight", "unread", "skipped", "reduced", "received", "carried", "left"]
"""How the value came to the place that a diagnosis names.

made        that place made it, out of finite values
outside     the model, or its backward, was handed it
changed     a weight was changed outside of forward, backward and step
weight      it is in a weight, and no frame shows how it came there
unread      that place returned it, of finite inputs, and nobody has looked at its weights
skipped     `--every` skipped that batch
reduced     this rank's own gradient was finite, and the one that the optimizer got was not
received    collectives ran there, so it may have come from any rank
carried     that place was handed it, and no frame shows its maker
left        it was in a parameter's gradient before the backward began that has added to that
"""


@dataclass(frozen=True)
class LocalDiagnosis:
    """Where one rank's first non-finite value came from."""

    rank: int
    attempt: int
    step: int
    batch: int
    root: str
    module: str
    cls: str
    phase: str
    """As in report.json."""
    source: Source
    role: str
    value: str
    dtype: str
    shape: tuple[int, ...] | None
    seq: int
    frame: int
    """Index in the page of the frame that first shows it."""
    between: tuple[str, str | None] | None = None
    from_page: bool = True
    sure: bool = True
    """False: the page leaves another explanation open."""
    clock: dict[str, int] = field(default_factory=dict)
    sent: dict[str, dict[int, int]] = field(default_factory=dict)
    received: dict[str, dict[int, int]] = field(default_factory=dict)
    """What the rank had issued then: see core.records.Where."""
    at: tuple[str, str, str] = ("", "", "")
    """(module, class, role) of the row that shows the value. `module` is where it was made."""
    turned: tuple[str, str] | None = None
    """(module, class) in which an expected -inf turned into nan."""
    weights_read: bool = True
    """False: its weights were last read after an optimizer step, and not again when the value was seen."""
    changed_since: bool = False
    """A bad weight was finite when it was last read, and no step can have changed it since."""
    history: str = ""
    """What is known of a bad weight from before: a clause (weight_timeline.py)."""
    computed: bool = False
    """The script has computed the bad weight from other tensors."""
    bad_buffers: tuple[str, ...] = ()
    """Buffers of the alarm's module that were not finite: `buffer inv_freq of `rotary` (Rotary)`."""
    changed: bool = False
    """Weights have changed since they were last read, by no step that was seen."""
    passed: bool = False
    """What a model was handed may have come from another rank, or from another model."""
    suspects: tuple[str, ...] = ()
    """Calls that can have made a gradient, where several can have: `module` holds all of them."""
    own_code: tuple[str, ...] = ()
    """Modules whose own code can have made a gradient, or a value that went on by another way than frames show."""
    excluded: tuple[str, ...] = ()
    """What has used a tensor with a bad gradient as well, and cannot have made it: `AddBackward0 of `block``."""
    mask: str = ""
    """Of which -inf a nan was made: `a row of input[1] is -inf throughout`."""
    seen_in: str = "forward"
    """Phase of the frame, as core.frames.Phase has it. A bad weight may show in a forward or after a step."""
    cause: str = ""
    notes: tuple[str, ...] = ()
    """Further evidence."""

    @property
    def own_role(self) -> str | None:
        """The role, if it is one of `module`'s own rows; None if the value was first seen in a row of another module.

        What the code of `attn` makes between two calls is first seen in `input[0]` of `attn.c_proj`.
        """
        return self.role if self.module == self.at[0] or self.role != self.at[2] else None

    @property
    def is_origin(self) -> bool:
        """`module` made the value, out of finite ones."""
        return self.source == "made"


def diagnosis_of_row(
    page: Page,
    frame: Frame,
    row: Row,
    anomaly: Anomaly,
    *,
    module: str,
    cls: str,
    phase: str,
    source: Source,
    role: str = "",
    between: tuple[str, str | None] | None = None,
    sure: bool = True,
    notes: tuple[str, ...] = (),
    turned: tuple[str, str] | None = None,
) -> LocalDiagnosis:
    """A diagnosis about one row of a page."""
    again = anomaly.again
    # a frame carries the number at its call's end; the value was seen before that
    seq = min((seq for seq in (frame.seq, anomaly.where.seq) if seq >= 0), default=-1)
    then = _issued_then(anomaly, seq)
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
        value=name_of(NonFinite(row.flags)),
        dtype=row.dtype,
        shape=tuple(row.shape) if row.shape is not None else None,
        seq=seq,
        frame=frame.index,
        between=between,
        sure=sure and not (source == "made" and again is not None and _may_be_elsewhere(again, module, phase)),
        clock=then.clock,
        sent=then.sent,
        received=then.received,
        at=(frame.module, frame.cls, row.role),
        turned=turned,
        seen_in=frame.phase,
        cause=anomaly.cause,
        notes=(*notes, *_of_scale(anomaly, phase), *_of_threads(again), *around(anomaly)),
        bad_buffers=tuple(_buffers(anomaly)),
        changed=again is not None and bool(again.changed),
    )


def _issued_then(anomaly: Anomaly, seq: int) -> Moment | Where:
    """What the rank had issued at its number `seq`; if nobody knows that, when the alarm was raised."""
    return next((moment for moment in anomaly.moments if moment.seq == seq), anomaly.where)


def left_before(page: Page, frame: Frame, row: Row, anomaly: Anomaly) -> LocalDiagnosis | None:
    """The diagnosis of an alarm's gradient that was not finite before its backward began; None for another one."""
    again = anomaly.again
    mine = (anomaly.frame, anomaly.module, anomaly.role)
    if again is None or not again.left or mine != (frame.index, frame.module, row.role):
        return None
    return diagnosis_of_row(
        page, frame, row, anomaly, module=frame.module, cls=frame.cls, phase="backward", source="left"
    )


def _may_be_elsewhere(again: LookedAgain, module: str, phase: str) -> bool:
    """Whether a second look has found what may have made a value in another place than `module`."""
    # where the graph tells who is behind a value, an attribute may only have kept it afterwards
    held = phase == "forward" and not again.own_code and any(each.module != module for each in again.held)
    return bool(again.changed) or again.threads or held


def _of_threads(again: LookedAgain | None) -> tuple[str, ...]:
    if again is None or not again.threads:
        return ()
    return ("modules were called in another thread within that forward, and have no frames: one can have made it",)


def _of_scale(anomaly: Anomaly, phase: str) -> tuple[str, ...]:
    """The scale that gradients had from a GradScaler: it may be the only reason why they were inf."""
    scale = anomaly.again.loss_scale if anomaly.again is not None else None
    if scale is None or phase not in ("backward", "collective", "optimizer"):
        return ()
    return (f"a GradScaler had scaled the loss; its scale was {scale:g} when the alarm was raised",)


def around(anomaly: Anomaly) -> tuple[str, ...]:
    """What a second look at the module of an alarm has found beside its weights."""
    again = anomaly.again
    if again is None:
        return ()
    found = [f"{name} is {value}" for name, value in _buffers(anomaly).items()]
    found += [
        f"attribute {each.name} of {module_text(each.module, each.cls)} holds {each.value}" for each in again.held
    ]
    found += [f"changed since it was last read, by no step that was seen: {text}" for text in again.changed]
    if again.autocast:
        found.append(f"autocast was on: {again.autocast}")
    if again.optimizer is not None and "lr" in again.optimizer.settings:
        name = again.optimizer.cls.rpartition(".")[2]
        found.append(f"the last step before was of {name}, learning rate {again.optimizer.settings['lr']:g}")
    return tuple(found)


def _buffers(anomaly: Anomaly) -> dict[str, str]:
    """Each bad buffer of the alarm's module, named with its module -> what is in it."""
    place = module_text(anomaly.module, anomaly.cls)
    buffers = anomaly.again.buffers if anomaly.again is not None else {}
    return {f"buffer {name} of {place}": value for name, value in buffers.items()}


def from_event(anomaly: Anomaly) -> LocalDiagnosis:
    """The diagnosis without the page: what the worker's event says of the first frame with a non-finite value."""
    found = LocalDiagnosis(
        rank=anomaly.where.rank,
        attempt=anomaly.where.attempt,
        step=anomaly.where.step,
        batch=anomaly.where.batch,
        root=anomaly.where.root,
        module=anomaly.module,
        cls=anomaly.cls,
        phase="forward" if anomaly.phase == "recompute" else anomaly.phase,
        source="made",
        role=anomaly.role,
        value=anomaly.value,
        dtype=anomaly.dtype,
        shape=tuple(anomaly.shape) if anomaly.shape is not None else None,
        seq=anomaly.where.seq,
        frame=anomaly.frame,
        from_page=False,
        clock=anomaly.where.clock,
        sent=anomaly.where.sent,
        received=anomaly.where.received,
        at=(anomaly.module, anomaly.cls, anomaly.role),
        seen_in=anomaly.phase,
        cause=anomaly.cause,
    )
    if is_skipped(anomaly):
        return replace(found, source="skipped")
    if anomaly.phase == "collective":
        return replace(found, source="reduced")
    if anomaly.phase == "optimizer" and parse_role(anomaly.role).kind is RoleKind.STATE:
        return replace(found, sure=False)
    if anomaly.phase == "optimizer":  # its gradient may have been non-finite before the step
        return replace(found, phase="weight", source="weight")
    if anomaly.phase == "backward":
        if parse_role(anomaly.role).kind is RoleKind.GRAD_OUTPUT:  # its user made it, and only the page shows the users
            root_class = split_label(anomaly.where.root)[0]
            return replace(found, module="", cls=root_class, between=("", anomaly.module), sure=False)
        return replace(found, sure=False)
    if not anomaly.weights_finite:
        return replace(found, phase="weight", source="weight")
    if not anomaly.inputs_finite:
        is_root = anomaly.module == "" and anomaly.phase == "forward"
        return replace(found, phase="input", source="outside") if is_root else replace(found, source="carried")
    if anomaly.collectives:
        return replace(found, phase="collective", source="received")
    return found


def is_skipped(anomaly: Anomaly) -> bool:
    """`--every` skipped this batch: only the root's output was read."""
    return anomaly.cause.startswith("not looked into")


def is_scalers(anomaly: Anomaly) -> bool:
    """A GradScaler had skipped too many steps, so that its non-finite gradients became an alarm."""
    return anomaly.cause.startswith("GradScaler")
