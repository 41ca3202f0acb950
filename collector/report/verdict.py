"""What report.json says first: the verdict, with the cause of an overflow and what it led to."""

from __future__ import annotations

from typing import TypedDict

import msgspec
from msgspec.structs import force_setattr

from ...core.codes import Certainty, VerdictKind, coded
from ...core.events.alarm_evidence import BadOperation, CaptureFile, CauseTrial, OddSamples


class SeenIn(msgspec.Struct, frozen=True):
    """The row that first shows a value, where that is not a row of the module that made it."""

    module: str
    cls: str = msgspec.field(name="class")
    role: str


class ConcurrentOrigin(msgspec.Struct, frozen=True):
    """Another origin, in no known order with the verdict's."""

    rank: int
    module: str
    cls: str = msgspec.field(name="class")
    role: str | None
    """As in the verdict."""
    value: str
    host: str = ""
    text: str = ""
    """What was found and where, in words."""
    seen_in: SeenIn | None = None


class CascadedRank(msgspec.Struct, frozen=True):
    """A rank that ended because the verdict's rank did."""

    rank: int
    how: str


class OverflowCause(msgspec.Struct, frozen=True):
    """Why a non-finite value was made. `next` stands first in the verdict's own."""

    kind: str
    """data, domain, precision, divergence, step, start, mask, scale, replica, hook, script or unrepeatable"""
    certainty: Certainty
    """established: a trial or arithmetic shows it"""
    statement: str
    """A sentence without its full stop."""
    next: list[str] = []
    trials: list[CauseTrial] = []
    sample: OddSamples | None = None

    @property
    def line(self) -> str:
        """The line below the verdict's statement."""
        return f"Cause, {self.certainty}: {self.statement}."


class Verdict(msgspec.Struct, frozen=True):
    """A field that does not apply is null. `role` is null if `seen_in` is set, and `rank` if `pid` is."""

    kind: VerdictKind
    statement: str
    certainty: Certainty
    rank: int | None = None
    host: str | None = None
    device: str | None = None
    module: str | None = None
    cls: str | None = msgspec.field(name="class", default=None)
    root: str | None = None
    phase: str | None = None
    role: str | None = None
    value: str | None = None
    dtype: str | None = None
    attempt: int | None = None
    step: int | None = None
    batch: int | None = None
    between: tuple[str | None, str | None] | None = None
    evidence: list[str] = []
    next: list[str] = []
    concurrent: list[ConcurrentOrigin] = []
    cascade: list[CascadedRank] = []
    signal: str | None = None
    stage: str | None = None
    bad_nodes: list[str] = []
    seen_in: SeenIn | None = None
    pid: int | None = None
    missing: list[str] = []
    operation: BadOperation | None = None
    gpu: str | None = None
    """UUID of the GPU of `rank`."""
    capture: CaptureFile | None = None
    cause: OverflowCause | None = None
    """None where it is not known."""
    code: str = ""
    """The kind's."""
    cause_code: str = ""
    """That of the cause in the statement: the first clause in `missing`, or the preflight's finding."""

    def __post_init__(self) -> None:
        force_setattr(self, "code", str(self.kind.code))

    def __repr__(self) -> str:
        """One line: what a notebook shows. The fields are as many as those of report.json."""
        more = [name for name in ("evidence", "next", "cause") if getattr(self, name)]
        rest = f"; see also {', '.join(f'.{name}' for name in more)}" if more else ""
        return f"<{self.kind}, {self.how_sure}: {self.statement} {self.codes}{rest}>"

    @property
    def headlines(self) -> list[str]:
        """The statement, and the cause where it is known."""
        return [self.statement, *([self.cause.line] if self.cause is not None else [])]

    @property
    def codes(self) -> str:
        """`[GW108] [GW502]`"""
        return coded(coded("", self.code), self.cause_code).strip()

    @property
    def how_sure(self) -> str:
        """Behind the kind, as the text and the page show it: a run that is unknown has no certainty beside that."""
        return "not proven clean" if self.kind is VerdictKind.UNKNOWN else str(self.certainty)


# Fields of a verdict that belong together, for the rules, which make several kinds of verdict of them.


class RankFields(TypedDict, total=False):
    """Who: a rank, or a process that is none."""

    rank: int | None
    host: str | None
    device: str | None
    pid: int | None


class PlaceFields(TypedDict, total=False):
    """Where in the run."""

    root: str | None
    attempt: int
    step: int | None
    batch: int | None


class OverflowFields(PlaceFields, total=False):
    """Where in the run and in the model a non-finite value was, and which. Only an overflow has the last four."""

    module: str | None
    cls: str | None
    phase: str | None
    role: str | None
    value: str
    dtype: str
    seen_in: SeenIn | None
