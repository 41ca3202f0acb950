"""The verdict as a value: report.json's `verdict`."""

from __future__ import annotations

import msgspec


class SeenIn(msgspec.Struct, frozen=True):
    """The row that first shows a value, where that is not a row of the module that made it."""

    module: str
    cls: str = msgspec.field(name="class")
    role: str


class Concurrent(msgspec.Struct, frozen=True):
    """Another origin, which nothing puts before or after the verdict's."""

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


class Cascade(msgspec.Struct, frozen=True):
    """A rank that ended because the verdict's rank did."""

    rank: int
    how: str


class Verdict(msgspec.Struct, frozen=True):
    """report.json's `verdict`; what does not apply is null."""

    kind: str
    statement: str
    certainty: str
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
    concurrent: list[Concurrent] = []
    cascade: list[Cascade] = []
    signal: str | None = None
    stage: str | None = None
    bad_nodes: list[str] = []
    """Nodes that it blames, as the scheduler calls them."""
    seen_in: SeenIn | None = None
    """Where the value was first seen, if that is no row of `module`'s own; `role` is null then."""
    pid: int | None = None
    """Of a process that is no rank: then `rank` is null."""
    missing: list[str] = []
    """What keeps a verdict `unknown` from `clean`."""
