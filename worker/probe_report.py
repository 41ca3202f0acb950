"""What a probe child prints for its worker: one JSON value per line."""

from __future__ import annotations

from typing import Literal

import msgspec

STAGES = ("start", "device", "allocation", "store", "arrive", "group", "all_gather", "all_reduce", "barrier", "done")
"""In the order in which they are reached."""

Outcome = Literal["ok", "failed", "victim"]


class StageBegan(msgspec.Struct, frozen=True, tag="began"):
    """A stage was entered: if no `ended` follows, this is where it hung or died."""

    stage: str


class StageEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A stage was passed."""

    stage: str
    seconds: float
    detail: str = ""


class Runtime(msgspec.Struct, frozen=True, tag="runtime"):
    """What the probe ran on."""

    backend: str
    device: str
    versions: dict[str, str]


class RankOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    """What one rank concluded of itself. `failed`: its own fault; `victim`: others did not do their part."""

    rank: int
    outcome: Outcome
    stage: str = ""
    detail: str = ""
    host: str = ""


class AllOutcomes(msgspec.Struct, frozen=True, tag="all"):
    """What every rank concluded; a rank without an outcome is in `silent`."""

    outcomes: list[RankOutcome]
    silent: list[int]


Line = StageBegan | StageEnded | Runtime | RankOutcome | AllOutcomes

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def parse(line: bytes) -> Line | None:
    """One line of a probe's output; None for anything that a library may have printed in between."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None
