"""What report.json shows of the preflight: its stages on all nodes, findings, bandwidth, inventory."""

from __future__ import annotations

import msgspec

from ...core.preflight import InventoryFacts, PreflightFinding

GRADES = ("ok", "victim", "unknown", "warn", "fail")
"""From good to bad. A `victim` failed only because others did. `""` is a stage that was not reached."""


class StageCell(msgspec.Struct, frozen=True):
    """One stage on one node."""

    grade: str
    ranks: int
    """How many of its ranks have ended it."""
    seconds: float = 0.0
    """The time that the slowest of them took."""
    rank: int | None = None
    """The slowest of them; for a failed stage, the first rank that failed in it."""
    detail: str = ""
    """That rank's own report of the stage."""


class NodeRow(msgspec.Struct, frozen=True):
    """One node in the preflight."""

    host: str
    ranks: list[int]
    grade: str
    stages: dict[str, StageCell]


class StageColumn(msgspec.Struct, frozen=True):
    """One stage over all nodes."""

    stage: str
    grade: str
    ranks: int
    seconds: float = 0.0
    rank: int | None = None
    host: str = ""


class BandwidthSize(msgspec.Struct, frozen=True):
    """One size of the bandwidth test, over all ranks; defined as in nccl-tests."""

    size_bytes: int
    ranks: int
    time_us: float
    """The slowest rank's, as are the bandwidths."""
    algbw_gbs: float
    busbw_gbs: float
    rank: int
    host: str
    best_busbw_gbs: float


class RankInventory(msgspec.Struct, frozen=True):
    """The hardware and software of a rank."""

    rank: int
    facts: InventoryFacts


class PreflightReport(msgspec.Struct, frozen=True):
    """The preflight of all ranks."""

    outcome: str = "off"
    """off, ok, skipped, victim or failed"""
    seconds: float = 0.0
    """The slowest rank's total over all stages."""
    stages: list[StageColumn] = []
    nodes: list[NodeRow] = []
    findings: list[PreflightFinding] = []
    """The worst first, without those that are `ok`."""
    bandwidth: list[BandwidthSize] = []
    inventory: list[RankInventory] = []
