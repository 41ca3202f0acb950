"""How long each stage of the preflight may take. Pure.

A rank's own part of a stage ends at `work`. The rank that gathers the reports waits until `reports`. All ranks wait for
the conclusion until `conclusion`. Each is longer than the one before, so that a failure can be reported in between: a
process that died or hung is replaced by one that informs the other ranks, and which must import torch again.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class Deadlines:
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
