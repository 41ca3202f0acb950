"""The steps of a rank as they travel: a table of (step, microseconds of each part), packed into bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy

from ..recorder.step_table import PARTS, TimedStep

MOST_STEPS = 512
"""In one message."""
_COLUMNS = 1 + len(PARTS)
_LARGEST = 0xFFFF_FFFF


def pack_steps(steps: Iterable[TimedStep]) -> bytes:
    """At most MOST_STEPS of them; a part of more than 71 minutes is shown as that long."""
    table = [(step.number, *(min(ns // 1000, _LARGEST) for ns in step.parts)) for step in steps][:MOST_STEPS]
    return zlib.compress(numpy.array(table, "<u4").reshape(-1, _COLUMNS).tobytes(), 1)


def unpack_steps(data: bytes) -> tuple[list[int], Any]:
    """(numbers of the steps, seconds of each part as float64 of shape (steps, parts)).

    Raises ValueError for bytes that no agent sends.
    """
    most = 4 * _COLUMNS * MOST_STEPS
    whole = zlib.decompressobj()
    try:
        raw = whole.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"steps that cannot be unpacked: {error}") from error
    if not whole.eof or len(raw) > most or len(raw) % (4 * _COLUMNS):
        raise ValueError(f"{len(raw)} bytes of steps")
    table = numpy.frombuffer(raw, "<u4").reshape(-1, _COLUMNS)
    return table[:, 0].tolist(), table[:, 1:].astype(numpy.float64) / 1e6
