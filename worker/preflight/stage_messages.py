"""What a coordinator prints for its worker: one JSON value per line.

{"type":"began","stage":"arrive","limit_s":60.0,"step":"arrive"}
{"type":"waits","step":"arrive","limit_s":85.0}
{"type":"ended","stage":"arrive","grade":"ok","seconds":0.41,"detail":"2 ranks on 1 node"}
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...core.preflight import BandwidthRow, Grade, InventoryFacts, PreflightFinding

Standing = Literal["ok", "failed", "victim"]
"""`failed`: by its own fault. `victim`: because of other ranks."""


class StageBegan(msgspec.Struct, frozen=True, tag="began"):
    """A stage has begun. If no `ended` follows, the rank hung or died in this stage."""

    stage: str
    limit_s: float
    """The stage ends by itself within this many seconds, or must be killed."""
    step: str
    """The step of this stage. For the inventory: the first step."""


class StageProgress(msgspec.Struct, frozen=True, tag="at"):
    """The progress of a stage, such as `all_reduce` of a process group."""

    stage: str
    doing: str
    limit_s: float = 0.0
    """If not 0: the new limit, from here on."""


class StepWait(msgspec.Struct, frozen=True, tag="waits"):
    """This rank has done its part of a step and waits for the others, in the store."""

    step: str
    limit_s: float


class StageEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A stage has ended."""

    stage: str
    grade: Grade
    seconds: float
    detail: str = ""


class InventoryLine(msgspec.Struct, frozen=True, tag="inventory"):
    """The inventory of the rank."""

    facts: InventoryFacts


class BandwidthLine(msgspec.Struct, frozen=True, tag="bandwidth"):
    """The bandwidth that this rank measured."""

    rows: list[BandwidthRow]


class FaultLine(msgspec.Struct, frozen=True, tag="fault"):
    """An error of gpuwatch itself."""

    message: str


class RankOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of the preflight for one rank."""

    rank: int
    standing: Standing
    stage: str = ""
    detail: str = ""


class PreflightEnd(msgspec.Struct, frozen=True, tag="concluded"):
    """The end of the preflight: the findings of all ranks, and the ranks that failed or were victims."""

    findings: list[PreflightFinding]
    outcomes: list[RankOutcome] = []
    backend: str = ""
    device: str = ""


Line = StageBegan | StageProgress | StepWait | StageEnded | InventoryLine | BandwidthLine | FaultLine | PreflightEnd

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def parse(line: bytes) -> Line | None:
    """Parse one line of a coordinator's output. None for a line that a library has printed."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


# What a rank reports to the others in one step, and the conclusion that all of them get.

Kind = Literal["ok", "raised", "died", "hung", "fallen", "fault", "foreign", "idle"]
"""`fallen`: the rank's coordinator itself died or hung. `fault`: an error of gpuwatch. `idle`: the rank had no part."""


class RankAttendance(msgspec.Struct, frozen=True):
    """A rank that has arrived. `node` is GROUP_RANK."""

    host: str
    node: int
    local_rank: int
    local_world_size: int
    device: str
    gpu: str = ""
    """UUID; "" if there is none or it is unknown."""


class ComputeResult(msgspec.Struct, frozen=True):
    """What one rank computed. Ranks with the same `device_type` must have the same bits."""

    digest: str
    milliseconds: float
    device_type: str
    uuid: str = ""
    """UUID of the GPU."""


class LinkSpeed(msgspec.Struct, frozen=True):
    """The bandwidth between two consecutive ranks that send to each other at once, in GB/s each way."""

    first: int
    second: int
    gbs: float


class RankMeasurements(msgspec.Struct, frozen=True):
    """What one rank measured. `links` are the links whose first rank it is."""

    rows: list[BandwidthRow]
    links: list[LinkSpeed] = []


class RankStepReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's part in one step."""

    kind: Kind = "ok"
    detail: str = ""
    own: bool | None = None
    """Whether a failure is this rank's own fault; None if this rank alone cannot tell."""
    peers: list[int] = []
    """The ranks that it blames instead."""
    next: str = ""
    said: str = ""
    """The last part of the test that it began."""
    findings: list[PreflightFinding] = []
    attendance: RankAttendance | None = None
    facts: InventoryFacts | None = None
    computed: ComputeResult | None = None
    measured: RankMeasurements | None = None


class RankRoster(msgspec.Struct, frozen=True):
    """The ranks that take part. Lists are indexed by rank."""

    hosts: list[str]
    nodes: list[int]
    local_ranks: list[int]
    backend: str
    gpus: list[str] = []
    """UUIDs; "" if there is none or it is unknown."""

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
    """The result of a group of two nodes."""

    a: int
    b: int
    ok: bool
    detail: str = ""


class StepConclusion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of all reports of a step and of the steps before."""

    next: str = ""
    """The next step; "" ends the preflight."""
    findings: list[PreflightFinding] = []
    outcomes: list[RankOutcome] = []
    roster: RankRoster | None = None
    """Only with the arrival's conclusion."""
    arrived: int = 0
    pairs: list[tuple[int, int]] = []
    """The nodes that test each other in the next step."""
    tried: list[PairTried] = []
    note: str = ""
    """The result of a step without failures, in words."""
    broken: str = ""
    """How the group over several nodes failed, while the search for the cause goes on."""

    @property
    def failed(self) -> bool:
        """Whether a finding has the grade fail: the training should not start."""
        return any(finding.grade == "fail" for finding in self.findings)
