"""A node's telemetry as it travels: a table of samples by series, packed into bytes.

A count travels as what it grew by since the sample before it that has one, which float32 holds well enough; -1 is
where it begins, or began anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy

from .metrics import is_count

MOST_SAMPLES = 1024
MOST_SERIES = 1024
MOST_BYTES = 4 << 20


def pack_samples(times_ns: Sequence[int], table: Any, whats: Sequence[str]) -> bytes:
    """`times_ns` ascend; `table` is float64 of shape (samples, series): nan is none, a count is as it stood."""
    seconds = (numpy.asarray(times_ns, numpy.float64) - times_ns[0]) / 1e9
    values = numpy.array(table, numpy.float64)
    for column, what in enumerate(whats):
        if is_count(what):
            values[:, column] = _growth(values[:, column])
    with numpy.errstate(over="ignore", invalid="ignore"):
        raw = seconds.astype("<f8").tobytes() + values.astype("<f4").tobytes(order="F")
    return zlib.compress(raw, 6)


def unpack_samples(data: bytes, series: int) -> tuple[Any, Any]:
    """(seconds since the first sample, float64 of shape (samples, series)); a count is what it grew by.

    Raises ValueError for bytes that no agent sends.
    """
    if not 0 < series <= MOST_SERIES:
        raise ValueError(f"telemetry of {series} series")
    whole = zlib.decompressobj()
    try:
        raw = whole.decompress(data, MOST_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"telemetry that cannot be unpacked: {error}") from error
    samples, rest = divmod(len(raw), 8 + 4 * series)
    if not whole.eof or rest or not 0 < samples <= MOST_SAMPLES:
        raise ValueError(f"{len(raw)} bytes of telemetry of {series} series")
    seconds = numpy.frombuffer(raw, "<f8", samples)
    if not numpy.isfinite(seconds).all() or (numpy.diff(seconds) < 0).any():
        raise ValueError("telemetry whose times do not ascend")
    values = numpy.frombuffer(raw, "<f4", offset=8 * samples).reshape(series, samples).T.astype(numpy.float64)
    values[~numpy.isfinite(values)] = numpy.nan
    return seconds, values


def _growth(count: Any) -> Any:
    grown = numpy.full(len(count), numpy.nan)
    known = numpy.flatnonzero(numpy.isfinite(count))
    steps = numpy.diff(count[known])
    grown[known[:1]] = -1
    grown[known[1:]] = numpy.where(steps >= 0, steps, -1)
    return grown
