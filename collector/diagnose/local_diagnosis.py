"""What one rank says of its first bad value: where it was made, or why that is not known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ...core.frames import Frame, Page, Row
from ...core.records import Anomaly, split_label
from ...core.roles import RoleKind, parse_role
from ...core.values import NonFinite, name_of

Source = Literal["made", "outside", "weight", "skipped", "reduced", "received", "carried"]
"""How the value came to the place that a diagnosis names.

made: here, out of finite ones. outside: it was handed in, to the model or to its backward. weight: nobody saw the
weight become bad. unlooked: in a batch that was left out. reduced: this rank's own gradient was finite, and what the
optimizer got was not. received: collectives ran there, so it may have come from any rank. carried: its maker was not
seen.
"""


@dataclass(frozen=True)
class LocalDiagnosis:
    """One rank's first bad value."""

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
    """Where it was first bad, in the order of the page."""
    between: tuple[str, str | None] | None = None
    from_page: bool = True
    sure: bool = True
    """False: the page leaves another explanation open."""
    clock: dict[str, int] = field(default_factory=dict)
    at: tuple[str, str, str] = ("", "", "")
    """(module, class, role) of the row that was bad: where `module` is the one that made it, this is what it made."""
    turned: tuple[str, str] | None = None
    """(module, class) in which an expected -inf turned into nan."""
    seen_in: str = "forward"
    """Phase of the frame, as core.frames.Phase has it: a weight may be bad in a forward, or after a step."""
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
        """The bad value was made here, out of finite ones."""
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
        # a call that went through collectives carries the number that it ended with; the value was seen before that
        seq=min((seq for seq in (frame.seq, anomaly.where.seq) if seq >= 0), default=-1),
        frame=frame.index,
        between=between,
        sure=sure,
        clock=anomaly.where.clock,
        at=(frame.module, frame.cls, row.role),
        turned=turned,
        seen_in=frame.phase,
        cause=anomaly.cause,
        notes=notes,
    )


def from_event(anomaly: Anomaly) -> LocalDiagnosis:
    """All that can be said without the page: the first frame that the worker saw a bad value in."""
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
        at=(anomaly.module, anomaly.cls, anomaly.role),
        seen_in=anomaly.phase,
        cause=anomaly.cause,
    )
    if is_skipped(anomaly):
        return replace(found, source="skipped")
    if anomaly.phase == "collective":
        return replace(found, source="reduced")
    if anomaly.phase == "optimizer":  # its gradient may have been bad before
        return replace(found, phase="weight", source="weight")
    if anomaly.phase == "backward":
        if parse_role(anomaly.role).kind is RoleKind.GRAD_OUTPUT:  # made by whatever used it, and that is in the page
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
    """Only what the root returned was looked at in this batch: `--every` left it out."""
    return anomaly.cause.startswith("not looked into")


def is_scalers(anomaly: Anomaly) -> bool:
    """Gradients were expected to be bad, until a GradScaler had skipped too many steps."""
    return anomaly.cause.startswith("GradScaler")
