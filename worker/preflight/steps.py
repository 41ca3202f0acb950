"""The steps of a preflight and their order. Pure.

A step is what the ranks do between two meetings. A stage, which the user sees, has one or more steps:

    quick   arrive, consistency, health, allocation, then the group over all ranks
    full    arrive, consistency, health, allocation, compute, node group, heads, cross group, bandwidth

If the group over all ranks fails and no rank is clearly to blame, `inside` tests the group of each node (unless that
was done before). Then pairs of nodes are tried: `pairs 1`, `pairs 2`, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["full", "quick"]

_LOCAL = ("arrive", "consistency", "health", "allocation")
_STAGE_OF = {"heads": "cross group", "inside": "node group"}


def stage_of(step: str) -> str:
    """The stage that a step belongs to.

    >>> stage_of("pairs 2")
    'cross group'
    """
    return "cross group" if step.startswith("pairs ") else _STAGE_OF.get(step, step)


def steps_of(mode: Mode, num_nodes: int) -> list[str]:
    """All steps of a preflight in which nothing goes wrong."""
    group = ["node group"] if num_nodes == 1 else ["cross group"]
    if mode == "quick":
        return [*_LOCAL, *group]
    return [*_LOCAL, "compute", "node group", *([] if num_nodes == 1 else ["heads", "cross group"]), "bandwidth"]


def step_after(step: str, mode: Mode, num_nodes: int) -> str:
    """The next step of a preflight in which nothing goes wrong; "" after the last one.

    >>> step_after("allocation", "quick", 2)
    'cross group'
    """
    steps = steps_of(mode, num_nodes)
    return dict(zip(steps, [*steps[1:], ""], strict=True))[step]


def is_local(step: str) -> bool:
    """Whether each rank does the step alone. A failure of one rank then does not block the others."""
    return step in ("consistency", "health", "allocation", "compute")


def stays_local(step: str, following: str) -> bool:
    """Whether each rank does both the step and the one after it alone."""
    return is_local(step) and is_local(following)


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
