"""What a rank tells of its preflight, and of what it runs on."""

from __future__ import annotations

import msgspec

from ..preflight import BandwidthRow, Grade, InventoryFacts, PreflightFinding
from .run_position import RankEvent


class PreflightBegan(RankEvent, frozen=True, tag="preflight_began"):
    """A stage of the preflight began on this rank. The rank hangs or died in a stage that has not ended."""

    stage: str
    limit_s: float = 0.0
    """Its deadline on this rank."""


class PreflightStage(RankEvent, frozen=True, tag="preflight_stage"):
    """A stage of the preflight ended on this rank."""

    stage: str
    seconds: float
    detail: str = ""
    grade: Grade = "ok"


class RankOutcome(msgspec.Struct, frozen=True):
    """The result of the preflight for one rank, in the words of `PreflightResult`."""

    rank: int
    outcome: str
    stage: str = ""
    detail: str = ""


class PreflightResult(RankEvent, frozen=True, tag="preflight_result"):
    """This rank's conclusion. `outcome` is ok, failed (its own fault), victim (it waited for others) or skipped."""

    outcome: str
    stage: str = ""
    detail: str = ""
    stops: bool = False
    backend: str = ""
    device: str = ""
    peers: list[RankOutcome] = []
    """The other ranks that failed or waited. torchrun stops ranks when the first one ends, so some cannot write."""
    findings: list[PreflightFinding] = []
    """What the preflight found in all ranks. Each rank has the same list."""


class BandwidthRows(RankEvent, frozen=True, tag="bandwidth"):
    """What this rank measured in the bandwidth test, one row per size."""

    rows: list[BandwidthRow]


class RankInventoryEvent(RankEvent, frozen=True, tag="inventory"):
    """What the rank runs on, read after torch was imported."""

    device: str
    versions: dict[str, str]
    facts: InventoryFacts | None = None


PreflightEvent = PreflightBegan | PreflightStage | PreflightResult | BandwidthRows | RankInventoryEvent
