"""Telemetry as it travels."""

from __future__ import annotations

import math
import zlib

import numpy
import pytest
from gpuwatch.core.wire.columns import pack_samples, unpack_samples

NONE = math.nan
S = 1_000_000_000


def test_a_level_comes_as_it_was_and_a_count_as_what_it_grew_by():
    table = [[40.0, 1e15], [NONE, NONE], [50.0, 1e15 + 4096]]
    packed = pack_samples([5 * S, 6 * S, 9 * S], table, ["temperature", "net_sent"])
    seconds, values = unpack_samples(packed, 2)
    assert seconds.tolist() == [0.0, 1.0, 4.0]
    numpy.testing.assert_array_equal(values, [[40.0, -1.0], [NONE, NONE], [50.0, 4096.0]])


def test_a_count_that_began_anew_says_so():
    _, values = unpack_samples(pack_samples([0, 1, 2], [[7.0], [2.0], [5.0]], ["rank_cpu"]), 1)
    numpy.testing.assert_array_equal(values, [[-1.0], [-1.0], [3.0]])


GOOD = pack_samples([0, S], [[1.0], [2.0]], ["power"])
BACKWARDS = zlib.compress(numpy.array([1.0, 0.0]).tobytes() + bytes(8))


@pytest.mark.parametrize(
    ("data", "series"),
    [
        *((GOOD, series) for series in (0, 2, 1 << 40)),
        *(
            (data, 1)
            for data in (GOOD[:-3], b"", b"x" * 40, BACKWARDS, zlib.compress(bytes(1 << 23)), zlib.compress(b""))
        ),
    ],
)
def test_bytes_that_no_agent_sends_are_refused(data, series):
    with pytest.raises(ValueError, match="telemetry"):
        unpack_samples(data, series)
