"""How long each stage of the preflight may take. Pure.

A rank's own part of a stage ends at `work`; whoever gathers the ranks' reports waits until `reports`, and everybody
waits for the conclusion until `conclusion`. Each is longer than the one before by the time that the news of a failure
takes: a process that has died or hung is replaced by one that tells the others, which imports torch anew.
"""

from __future__ import annotations

from dataclasses import dataclass

_TABLE_S = {
    "inventory": 300.0,  # torch is imported in it, from a file system that may be cold and slow
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
"""For the rank that takes the leader's place."""
_TORCH_SHARE = 0.7
"""Of a group's deadline is torch's own timeout: who only waits gives up first, then who hangs is killed."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds, from the start of a stage on this rank. `timeout_s` is --preflight-timeout."""

    timeout_s: float

    def work(self, stage: str) -> float:
        """For this rank's own part. Of the arrival: for all ranks to come."""
        return self.timeout_s if stage == "arrive" else min(_TABLE_S[stage], self.timeout_s)

    def inside_group(self, stage: str) -> float:
        """For each collective in a process group of this stage."""
        return self.work(stage) * _TORCH_SHARE

    def reports(self, stage: str) -> float:
        """For the reports of all ranks to be there, from the end of the leader's own part."""
        return self.work(stage) if stage == "arrive" else self.work(stage) + _NEWS_S

    def conclusion(self, stage: str) -> float:
        """For the conclusion to be there, from the end of a rank's own part."""
        return self.reports(stage) + _CONCLUSION_S

    def wait(self, stage: str) -> float:
        """For the conclusion of the rank that takes the leader's place, if it comes to that: then it is over."""
        return self.conclusion(stage) + DEPUTY_S
