"""What a coordinator prints for its worker: one JSON value per line.

{"type":"began","stage":"arrive","limit_s":60.0,"step":"arrive"}
{"type":"waits","step":"arrive","limit_s":85.0}
{"type":"ended","stage":"arrive","grade":"ok","seconds":0.41,"detail":"2 ranks on 1 node"}
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...core.preflight import BandwidthRow, Finding, Grade, InventoryFacts

Standing = Literal["ok", "failed", "victim"]
"""`failed`: by its own fault. `victim`: because of other ranks."""


class StageBegan(msgspec.Struct, frozen=True, tag="began"):
    """A stage has begun. If no `ended` follows, the rank hung or died in this stage."""

    stage: str
    limit_s: float
    """The stage ends by itself within this many seconds, or must be killed."""
    step: str
    """The step of this stage. For the inventory: the first step."""


class At(msgspec.Struct, frozen=True, tag="at"):
    """The progress of a stage, such as `all_reduce` of a process group."""

    stage: str
    doing: str
    limit_s: float = 0.0
    """If not 0: the new limit, from here on."""


class Waits(msgspec.Struct, frozen=True, tag="waits"):
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


class Concluded(msgspec.Struct, frozen=True, tag="concluded"):
    """The end of the preflight: the findings of all ranks, and the ranks that failed or were victims."""

    findings: list[Finding]
    outcomes: list[RankOutcome] = []
    backend: str = ""
    device: str = ""


Line = StageBegan | At | Waits | StageEnded | InventoryLine | BandwidthLine | FaultLine | Concluded

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def parse(line: bytes) -> Line | None:
    """Parse one line of a coordinator's output. None for a line that a library has printed."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None
