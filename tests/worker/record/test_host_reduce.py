"""The compiled loops against the same in NumPy: equal for any bits, any length, any address."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy
import pytest
from gpuwatch.core.values import DTYPE_CODES, ValueEncoding
from gpuwatch.worker.record import host_reduce as bits
from hypothesis import given
from hypothesis import strategies as st

TYPES = {2: numpy.int16, 4: numpy.int32, 8: numpy.int64}
CODES = {DTYPE_CODES[name]: size for name, size in (("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8))}
FLOAT32 = DTYPE_CODES["float32"]
META = {DTYPE_CODES[encoding.name.lower()]: encoding << 8 for encoding in list(ValueEncoding)[1:]}


def numbers(read, array, dtype):
    """Low, high and encoding. `meta` may have further bits."""
    low, high, meta = read(array.ctypes.data, array.size, dtype)
    return low, high, meta & 0xFFFF


compiled = pytest.mark.skipif(
    bits.read_floats is bits.slow_read_floats, reason="worker/native was not built where gpuwatch was installed"
)


@compiled
@given(
    data=st.binary(max_size=8 * 400),
    dtype=st.sampled_from(sorted(CODES)),
    skipped=st.integers(0, 9),
    repeated=st.sampled_from([1, 1, 50]),
    limit=st.integers(0, (1 << 15) - 1),
)
def test_both_loops_see_the_same(data, dtype, skipped, repeated, limit):
    size = CODES[dtype]
    array = numpy.frombuffer(data[: len(data) // size * size] * repeated, TYPES[size])[skipped:]
    place = (array.ctypes.data, array.size)

    assert bits.read_floats(*place, dtype) == bits.slow_read_floats(*place, dtype)
    assert bits.below(*place, size, limit) == bits.slow_below(*place, size, limit)


@pytest.mark.parametrize("read", [pytest.param(bits.read_floats, marks=compiled), bits.slow_read_floats])
@pytest.mark.parametrize("dtype", sorted(CODES))
def test_one_element_among_many_is_found(read, dtype):
    size, meta = CODES[dtype], META[dtype]
    mask = int(numpy.iinfo(TYPES[size]).max)
    array = numpy.full(3 * bits.CHUNK + 17, 5, TYPES[size])
    for position in (0, 63, 64, 16383, 16384, bits.CHUNK, array.size - 1):
        array[position] = -1  # all bits set: with the sign cleared, the largest there is
        assert numbers(read, array, dtype) == (5, mask, meta)
        array[position] = 0
        assert numbers(read, array, dtype) == (0, 5, meta)
        array[position] = 5


@pytest.mark.parametrize("below", [pytest.param(bits.below, marks=compiled), bits.slow_below])
@pytest.mark.parametrize("size", sorted(TYPES))
def test_more_zeros_than_an_element_could_count(below, size):
    array = numpy.zeros(200_003, TYPES[size])
    array[::7] = 3
    count = len(array[::7])
    assert below(array.ctypes.data, array.size, size, 3) == (array.size - count, array.size - count)
    assert below(array.ctypes.data, array.size, size, 4) == (array.size - count, array.size)


@pytest.mark.parametrize("read", [pytest.param(bits.read_floats, marks=compiled), bits.slow_read_floats])
def test_wrong_arguments_are_refused(read):
    for arguments in ((0, 0, 0), (0, 0, DTYPE_CODES["int64"]), (0, 0, -1), (0, 0), ("here", 1, DTYPE_CODES["float32"])):
        with pytest.raises(TypeError):
            read(*arguments)


@pytest.mark.parametrize("below", [pytest.param(bits.below, marks=compiled), bits.slow_below])
def test_wrong_arguments_of_a_count_are_refused(below):
    for arguments in ((0, 0, 3, 1), (0, 0, 4), ("here", 1, 4, 1)):
        with pytest.raises(TypeError):
            below(*arguments)


# -- with several threads -----------------------------------------------------------------------------------------


class Team:
    """Stands for OpenMP: `given` threads in place of those asked for, one after the other, in this thread."""

    def __init__(self, most: int, given: int, *, is_parallel: bool = False) -> None:
        self.asked: list[int] = []
        self._thread = 0

        def parallel(part, shared, threads, flags):
            self.asked.append(threads)
            for self._thread in range(given):
                part(shared)

        number = ctypes.CFUNCTYPE(ctypes.c_int)
        of_thread = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._kept = [
            ctypes.CFUNCTYPE(None, of_thread, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel),
            number(lambda: most),
            number(lambda: is_parallel),
            number(lambda: self._thread),
            number(lambda: given),
        ]

    def __enter__(self) -> Team:
        bits.use_threads(*(ctypes.cast(function, ctypes.c_void_p).value for function in self._kept))
        return self

    def __exit__(self, *error: object) -> None:
        bits.use_threads()
        bits._use_threads()


LARGE = 1 << 18
"""Bytes, from which on a tensor is read by several threads."""


@compiled
@pytest.mark.parametrize(("most", "given"), [(2, 2), (3, 3), (7, 7), (64, 64), (5, 2), (4, 1)])
@pytest.mark.parametrize("dtype", sorted(CODES))
def test_every_element_is_in_the_part_of_some_thread(dtype, most, given):
    size, meta = CODES[dtype], META[dtype]
    mask = int(numpy.iinfo(TYPES[size]).max)
    array = numpy.full(LARGE // size + 5, 3, TYPES[size])
    stretch = -(-array.size // given)
    edges = [edge + side for edge in range(0, array.size + 1, stretch) for side in (-1, 0)]
    with Team(most, given) as team:
        for position in [array.size - 1, *(edge for edge in edges if 0 <= edge < array.size)]:
            array[position] = -1
            assert numbers(bits.read_floats, array, dtype) == (3, mask, meta)
            array[position] = 0
            assert numbers(bits.read_floats, array, dtype) == (0, 3, meta)
            array[position] = 3
    assert set(team.asked) == {most}


@compiled
@pytest.mark.parametrize(
    ("elements", "team"),
    [
        pytest.param(LARGE // 4 - 1, Team(8, 8), id="small"),
        pytest.param(LARGE, Team(1, 1), id="one thread"),
        pytest.param(LARGE, Team(8, 8, is_parallel=True), id="in a loop that is parallel already"),
    ],
)
def test_nobody_else_is_asked(elements, team):
    array = numpy.full(elements, 3, numpy.int32)
    with team:
        assert bits.read_floats(array.ctypes.data, array.size, FLOAT32)[:2] == (3, 3)
    assert team.asked == []


@compiled
def test_more_threads_than_are_ever_used():
    array = numpy.arange(1, LARGE + 1, dtype=numpy.int32)
    with Team(200, 64) as team:
        assert bits.read_floats(array.ctypes.data, array.size, FLOAT32)[:2] == (1, LARGE)
    assert team.asked == [64]


ON_TORCHS_THREADS = """
import os, threading, torch
from gpuwatch.worker.record import host_reduce as bits
torch.set_num_threads(2)
tensor = torch.full((1 << 22,), 2.0)
tensor[-1] = float("-inf")
def look():
    return bits.read_floats(tensor.data_ptr(), tensor.numel(), 1)
expected = (0x40000000, 0x7F800000, 2 << 8)
def threads():
    return len(os.listdir("/proc/self/task"))
(tensor + 1).sum()  # torch's threads have begun by now
before = threads()
for _ in range(5):
    assert look() == expected
assert threads() == before, "torch's threads are not the ones that read"
found = []
other = threading.Thread(target=lambda: found.append(look()))
other.start()
other.join()
assert found == [expected]
if not (child := os.fork()):  # here, those threads are no more
    os._exit(0 if look() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
print(before)
"""


@pytest.mark.slow
@compiled
def test_torchs_own_threads_read_and_no_others():
    ran = subprocess.run([sys.executable, "-c", ON_TORCHS_THREADS], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 2


@compiled
def test_a_torch_without_openmp_is_read_by_one_thread(monkeypatch):
    array = numpy.full(LARGE, 3, numpy.int32)
    with Team(8, 8) as team:
        bits.use_threads()
        monkeypatch.setattr(bits, "_OPENMP", ("no_such_function",))
        bits._use_threads()
        assert bits.read_floats(array.ctypes.data, array.size, FLOAT32)[:2] == (3, 3)
        monkeypatch.undo()
    assert team.asked == []
