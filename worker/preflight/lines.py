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
"""`failed`: by its own fault; `victim`: others did not do their part."""


class StageBegan(msgspec.Struct, frozen=True, tag="began"):
    """A stage was entered: if no `ended` follows, this is where it hung or died."""

    stage: str
    limit_s: float
    """It ends by itself within so many seconds, or is to be ended."""
    step: str
    """The step that it belongs to, or, of the inventory, the first one."""


class At(msgspec.Struct, frozen=True, tag="at"):
    """How far a stage has come: `all_reduce` of a process group."""

    stage: str
    doing: str
    limit_s: float = 0.0
    """If not 0: from here on it may take so long."""


class Waits(msgspec.Struct, frozen=True, tag="waits"):
    """This rank has done its part of a step and waits for the others, in torchrun's store."""

    step: str
    limit_s: float


class StageEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A stage is over."""

    stage: str
    grade: Grade
    seconds: float
    detail: str = ""


class InventoryLine(msgspec.Struct, frozen=True, tag="inventory"):
    """What the rank runs on."""

    facts: InventoryFacts


class BandwidthLine(msgspec.Struct, frozen=True, tag="bandwidth"):
    """What this rank measured."""

    rows: list[BandwidthRow]


class FaultLine(msgspec.Struct, frozen=True, tag="fault"):
    """An error of gpuwatch itself."""

    message: str


class RankOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one rank came through."""

    rank: int
    standing: Standing
    stage: str = ""
    detail: str = ""


class Concluded(msgspec.Struct, frozen=True, tag="concluded"):
    """The end: what was found in all ranks, and the ranks for which not all went well."""

    findings: list[Finding]
    outcomes: list[RankOutcome] = []
    backend: str = ""
    device: str = ""


Line = StageBegan | At | Waits | StageEnded | InventoryLine | BandwidthLine | FaultLine | Concluded

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def parse(line: bytes) -> Line | None:
    """One line of a coordinator's output; None for anything that a library may have printed in between."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None
