"""The compiled loops against the same in NumPy: equal for any bits, any length, any address."""

from __future__ import annotations

import numpy
import pytest
from gpuwatch.worker import bits
from hypothesis import given
from hypothesis import strategies as st

TYPES = {2: numpy.int16, 4: numpy.int32, 8: numpy.int64}

compiled = pytest.mark.skipif(
    bits.extremes is bits.slow_extremes, reason="fast.c was not built where gpuwatch was installed"
)


@compiled
@given(
    data=st.binary(max_size=8 * 400),
    size=st.sampled_from(sorted(TYPES)),
    skipped=st.integers(0, 9),
    repeated=st.sampled_from([1, 1, 50]),
    limit=st.integers(0, (1 << 15) - 1),
)
def test_both_loops_see_the_same(data, size, skipped, repeated, limit):
    array = numpy.frombuffer(data[: len(data) // size * size] * repeated, TYPES[size])[skipped:]
    place = (array.ctypes.data, array.size, size)

    assert bits.extremes(*place) == bits.slow_extremes(*place)
    assert bits.below(*place, limit) == bits.slow_below(*place, limit)


@pytest.mark.parametrize("extremes", [pytest.param(bits.extremes, marks=compiled), bits.slow_extremes])
@pytest.mark.parametrize("size", sorted(TYPES))
def test_one_element_among_many_is_found(extremes, size):
    mask = int(numpy.iinfo(TYPES[size]).max)
    array = numpy.full(3 * bits.CHUNK + 17, 5, TYPES[size])
    for position in (0, 63, 64, 16383, 16384, bits.CHUNK, array.size - 1):
        array[position] = -1  # all bits set: with the sign cleared, the largest there is
        assert extremes(array.ctypes.data, array.size, size) == (5, mask)
        array[position] = 0
        assert extremes(array.ctypes.data, array.size, size) == (0, 5)
        array[position] = 5


@pytest.mark.parametrize("below", [pytest.param(bits.below, marks=compiled), bits.slow_below])
@pytest.mark.parametrize("size", sorted(TYPES))
def test_more_zeros_than_an_element_could_count(below, size):
    array = numpy.zeros(200_003, TYPES[size])
    array[::7] = 3
    count = len(array[::7])
    assert below(array.ctypes.data, array.size, size, 3) == (array.size - count, array.size - count)
    assert below(array.ctypes.data, array.size, size, 4) == (array.size - count, array.size)


@pytest.mark.parametrize("extremes", [pytest.param(bits.extremes, marks=compiled), bits.slow_extremes])
def test_wrong_arguments_are_refused(extremes):
    for arguments in ((0, 0, 3), (0, 0), ("here", 1, 4)):
        with pytest.raises(TypeError):
            extremes(*arguments)
