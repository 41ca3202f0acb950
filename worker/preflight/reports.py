"""What a rank tells the others of one step, and what all of them hear in return."""

from __future__ import annotations

from typing import Literal

import msgspec

from ...core.preflight import Finding, InventoryFacts
from .lines import RankOutcome
from .stages.bandwidth import Measured
from .stages.compute import ComputeResult

Kind = Literal["ok", "raised", "died", "hung", "fallen", "fault", "idle"]
"""`fallen`: the rank's coordinator itself died or hung. `fault`: an error of the test. `idle`: it had no part in it."""


class Attendance(msgspec.Struct, frozen=True):
    """Who has come. `node` is GROUP_RANK."""

    host: str
    node: int
    local_rank: int
    local_world_size: int
    device: str
    gpu: str = ""
    """UUID; "" where there is none, or it is not known."""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's part in one step."""

    kind: Kind = "ok"
    detail: str = ""
    own: bool | None = None
    """Of what went wrong: whether it is this rank's own fault; None if that cannot be told from here alone."""
    peers: list[int] = []
    """Whom it blames instead."""
    next: str = ""
    said: str = ""
    """The last thing that it had begun."""
    findings: list[Finding] = []
    attendance: Attendance | None = None
    facts: InventoryFacts | None = None
    computed: ComputeResult | None = None
    measured: Measured | None = None


class Roster(msgspec.Struct, frozen=True):
    """Who takes part, by rank."""

    hosts: list[str]
    nodes: list[int]
    local_ranks: list[int]
    backend: str
    gpus: list[str] = []
    """UUIDs; "" where there is none, or it is not known."""

    def ranks_of(self, *nodes: int) -> list[int]:
        """The ranks of these nodes."""
        return [rank for rank, node in enumerate(self.nodes) if node in nodes]

    @property
    def ranks_by_node(self) -> dict[int, list[int]]:
        """Node -> its ranks."""
        return {node: self.ranks_of(node) for node in sorted(set(self.nodes))}

    @property
    def hosts_by_node(self) -> dict[int, str]:
        """Node -> its host."""
        return dict(zip(self.nodes, self.hosts, strict=True))

    @property
    def hosts_by_rank(self) -> dict[int, str]:
        """Rank -> its host."""
        return dict(enumerate(self.hosts))


class PairTried(msgspec.Struct, frozen=True):
    """How the group of two nodes went."""

    a: int
    b: int
    ok: bool
    detail: str = ""


class Conclusion(msgspec.Struct, frozen=True, omit_defaults=True):
    """What follows from all reports of a step, together with those of the steps before."""

    next: str = ""
    """The step to take now; "" ends the preflight."""
    findings: list[Finding] = []
    outcomes: list[RankOutcome] = []
    roster: Roster | None = None
    """Only with the arrival's conclusion."""
    arrived: int = 0
    pairs: list[tuple[int, int]] = []
    """The nodes that test each other in the next step."""
    tried: list[PairTried] = []
    note: str = ""
    """What the step has shown, in words, where all is well."""
    broken: str = ""
    """How the group over several nodes has failed, while it is being found out who is to blame."""

    @property
    def failed(self) -> bool:
        """Whether something was found for which the training should not start."""
        return any(finding.grade == "fail" for finding in self.findings)
