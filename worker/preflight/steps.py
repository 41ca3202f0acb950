"""The steps of a preflight: their order, their deadlines, and their messages. Pure.

A step is what the ranks do between two meetings. A stage, which the user sees, has one or more steps:

    quick   arrive, consistency, health, allocation, then the group over all ranks
    full    arrive, consistency, health, allocation, compute, node group, heads, cross group, bandwidth

If the group over all ranks fails and no rank is clearly to blame, `inside` tests the group of each node (unless that
was done before). Then pairs of nodes are tried: `pairs 1`, `pairs 2`, ... If a job's only node fails inside, pairs of
its ranks are tried: `ranks 1`, `ranks 2`, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from ...core.events.own_limits import OwnFault
from ...core.events.preflight_events import (
    BandwidthRows,
    PreflightBegan,
    PreflightStage,
    RankInventoryEvent,
    RankOutcome,
)
from ...core.preflight import BandwidthRow, InventoryFacts, PreflightFinding

_LOCAL = ("arrive", "consistency", "health", "allocation")
_STAGE_OF = {"heads": "cross group", "pairs": "cross group", "inside": "node group", "ranks": "node group"}


def stage_of(step: str) -> str:
    """The stage that a step belongs to.

    >>> stage_of("pairs 2"), stage_of("ranks 1")
    ('cross group', 'node group')
    """
    return _STAGE_OF.get(step.partition(" ")[0] if is_of_pairs(step) else step, step)


def is_of_pairs(step: str) -> bool:
    """Whether pairs of nodes or of ranks test each other in the step."""
    return step.startswith(("pairs ", "ranks "))


def steps_of(mode: str, num_nodes: int) -> list[str]:
    """All steps of a preflight in which nothing goes wrong. `mode` is `quick`, or else `full`."""
    if mode == "quick":
        return [*_LOCAL, "node group" if num_nodes == 1 else "cross group"]
    return [*_LOCAL, "compute", "node group", *([] if num_nodes == 1 else ["heads", "cross group"]), "bandwidth"]


def step_after(step: str, mode: str, num_nodes: int) -> str:
    """The next step of a preflight in which nothing goes wrong; "" after the last one.

    >>> step_after("allocation", "quick", 2)
    'cross group'
    """
    steps = steps_of(mode, num_nodes)
    return dict(zip(steps, [*steps[1:], ""], strict=True))[step]


def is_local(step: str) -> bool:
    """Whether each rank does the step alone. A failure of one rank then does not block the others."""
    return step in ("consistency", "health", "allocation", "compute")


# How long each stage of the preflight may take. Pure.
#
# A rank's own part of a stage ends at `work`. The rank that gathers the reports waits until `reports`. All ranks wait
# for the conclusion until `conclusion`. Each is longer than the one before, so that a failure can be reported in
# between: a process that died or hung is replaced by one that informs the other ranks, and which must import torch
# again.

_TABLE_S = {
    "inventory": 300.0,  # it includes the import of torch, perhaps from a slow file system
    "consistency": 20.0,
    "health": 30.0,
    "allocation": 60.0,
    "compute": 60.0,
    "node group": 60.0,
    "cross group": 60.0,
    "bandwidth": 60.0,
}
_NEWS_S = 15.0
_CONCLUSION_S = 8.0
DEPUTY_S = 2 * _CONCLUSION_S
"""For the deputy, the rank that takes the leader's place."""
_TORCH_SHARE = 0.7
"""torch's own timeout as a share of a group's deadline: ranks that only wait give up before hung ones are killed."""


@dataclass(frozen=True)
class StageDeadlines:
    """Seconds, from the start of a stage on this rank. `timeout_s` is --preflight-timeout."""

    timeout_s: float

    def work(self, stage: str) -> float:
        """For this rank's own part. For `arrive`: until all ranks have arrived."""
        return self.timeout_s if stage == "arrive" else min(_TABLE_S[stage], self.timeout_s)

    def inside_group(self, stage: str) -> float:
        """For each collective in a process group of this stage."""
        return self.work(stage) * _TORCH_SHARE

    def reports(self, stage: str) -> float:
        """For the reports of all ranks, from the end of the leader's own part."""
        return self.work(stage) if stage == "arrive" else self.work(stage) + _NEWS_S

    def conclusion(self, stage: str) -> float:
        """For the conclusion, from the end of a rank's own part."""
        return self.reports(stage) + _CONCLUSION_S

    def wait(self, stage: str) -> float:
        """For the conclusion of the deputy, if the leader gives none. After it a rank stops waiting."""
        return self.conclusion(stage) + DEPUTY_S


# What a coordinator prints for its worker, one JSON value per line: events, in which the worker fills in where the run
# stands, and these two.
#
# {"type":"preflight_began","where":{...},"stage":"arrive","limit_s":60.0}
# {"type":"at","step":"arrive","limit_s":85.0,"waits":true}
# {"type":"preflight_stage","where":{...},"stage":"arrive","seconds":0.41,"detail":"2 ranks on 1 node","grade":"ok"}


class StageProgress(msgspec.Struct, frozen=True, tag="at", omit_defaults=True):
    """Where the rank is in a stage that has begun. If the stage does not end, the rank hung or died there."""

    step: str
    doing: str = ""
    """A part of the step, such as `all_reduce` of a process group."""
    limit_s: float = 0.0
    """If not 0: it ends by itself within this many seconds from here on, or must be killed."""
    waits: bool = False
    """The rank has done its part of the step and waits for the others, in the store."""


class PreflightEnd(msgspec.Struct, frozen=True, tag="concluded"):
    """The end of the preflight: the findings of all ranks, and the ranks that failed or were victims."""

    findings: list[PreflightFinding]
    outcomes: list[RankOutcome] = []
    backend: str = ""
    device: str = ""


StageEvent = PreflightBegan | PreflightStage | RankInventoryEvent | BandwidthRows | OwnFault
Line = StageEvent | StageProgress | PreflightEnd
LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
"""In a coordinator's output."""


# A rank's report to the others in one step, and the conclusion that all of them get.

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

    @property
    def has_gpu(self) -> bool:
        """Whether it has a GPU of its own."""
        return self.device not in ("", "cpu")


class ComputeResult(msgspec.Struct, frozen=True):
    """The results of one rank. Ranks with the same `device_type` must have the same bits."""

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
    """The measurements of one rank. `links` are the links whose first rank it is."""

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
    """The ranks that take part."""

    ranks: list[RankAttendance]
    """By rank."""

    @property
    def backend(self) -> str:
        """NCCL only if every rank has its own GPU."""
        return "nccl" if all(one.has_gpu for one in self.ranks) else "gloo"

    def ranks_of(self, *nodes: int) -> list[int]:
        """The ranks of these nodes."""
        return [rank for rank, one in enumerate(self.ranks) if one.node in nodes]

    @property
    def ranks_by_node(self) -> dict[int, list[int]]:
        """Node -> its ranks."""
        return {node: self.ranks_of(node) for node in sorted(self.hosts_by_node)}

    @property
    def hosts_by_node(self) -> dict[int, str]:
        """Node -> its host."""
        return {one.node: one.host for one in self.ranks}

    @property
    def hosts_by_rank(self) -> dict[int, str]:
        """Rank -> its host."""
        return {rank: one.host for rank, one in enumerate(self.ranks)}


class PairResult(msgspec.Struct, frozen=True):
    """The result of the group test of two nodes, or of two ranks. `detail` says what failed."""

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
    """The nodes, or the ranks, that test each other in the next step."""
    tried: list[PairResult] = []
    note: str = ""
    """The result of a step without failures, in words."""
    why: str = ""
    """While pairs of ranks are tried: why their group failed."""

    @property
    def failed(self) -> bool:
        """Whether a finding has the grade fail: the training should not start."""
        return any(finding.grade == "fail" for finding in self.findings)
