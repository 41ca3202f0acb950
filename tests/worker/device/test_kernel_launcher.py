"""Kernels that the driver launches: only after their parameters and a trial were right. This driver is on the host."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.worker.device.kernel_launcher import LAUNCHED_KERNEL, KernelLauncher, KernelTrial, TrialWay, launch
from gpuwatch.worker.device.tensor_source import KINDS, TensorSource
from gpuwatch.worker.device.torch_reader import TorchReader
from gpuwatch.worker.record.float_formats import LOW_PRECISION

pytestmark = pytest.mark.skipif(launch is None, reason="worker/native was not built where gpuwatch was installed")

READ, MANY, PACK = bytes((8, 8, 4, 4, 4, 4)), bytes((8, 8, 8, 4)), bytes((8, 8, 4))
TWO = bytes((8, 8, 8, 4, 4, 4, 4))
SIZES = {TrialWay.READ: READ, TrialWay.TWO: TWO, TrialWay.MANY: MANY, TrialWay.KEPT: MANY, TrialWay.PACK: PACK}
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)


def given_to(sizes, arguments):
    """The arguments of a launch, which lie at these places."""
    places = (ctypes.c_void_p * len(sizes)).from_address(arguments)
    return [
        int.from_bytes(ctypes.string_at(place, size), "little", signed=True)
        for place, size in zip(places, sizes, strict=True)
    ]


class Driver:
    """libcuda for one kernel, `compute(argument, ...)`, whose parameters have these sizes."""

    def __init__(self, sizes, compute=lambda *arguments: None, error=0):
        self.sizes, self.compute, self.error = sizes, compute, error
        self.launches = []
        self.cuLaunchKernel = LAUNCH(self.launch)

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def launch(self, function, x, y, z, tx, ty, tz, shared, stream, arguments, extra):
        given = given_to(self.sizes, arguments)
        self.launches.append(((function, x, y, z, tx, ty, tz, shared, stream), given))
        self.compute(*given)
        return self.error


def at(address, words):
    return torch.frombuffer((ctypes.c_int64 * words).from_address(address), dtype=torch.int64)


def computed(way, dtype, count):
    """A kernel that does what it should."""

    def merge(source, row, elements):
        numbers = torch.frombuffer((ctypes.c_char * (elements * dtype.itemsize)).from_address(source), dtype=dtype)
        TorchReader().read(TensorSource(numbers, elements, elements, 0), at(row, 6).view(1, 6), 0, count)

    def read(source, rows, position, elements, inner, stride):
        merge(source, rows + 48 * position, elements)

    def two(source, other, rows, position, elements, others, first):
        merge(source, rows + 48 * position, elements)
        merge(other, rows + 48 * (position + 1), others)

    def many(table, earlier, rows, number):
        _, _, source, position, elements, *_ = at(table, 8).tolist()
        if way is TrialWay.KEPT:
            at(rows + 48 * position, 3).copy_(at(at(earlier, 256)[position].item(), 3))
        else:
            merge(source, rows + 48 * position, elements)

    def pack(rows, packed, count):
        at(packed, 3 * count).view(count, 3).copy_(TorchReader().pack(at(rows, 6 * count).view(count, 6), count))

    return {TrialWay.READ: read, TrialWay.TWO: two, TrialWay.PACK: pack}.get(way, many)


COMPILED = SimpleNamespace(function=0x1234, metadata=SimpleNamespace(num_warps=4, shared=96, num_ctas=1))


def tried(driver, way=TrialWay.READ, dtype=torch.float32, count=False, layout=0, compiled=COMPILED):
    """What two calls return for one kernel, and the note."""
    notes = []
    launcher = KernelLauncher(notes.append, driver)

    def begin(kernel):
        return KernelTrial(
            way, lambda *arguments: launch(kernel, 1, 7, *arguments), torch.device("cpu"), dtype, count, layout
        )

    return [launcher.tried("key", compiled, SIZES[way], begin) for _ in range(3)], notes


@pytest.mark.quick(15)
@pytest.mark.parametrize("dtype", list(KINDS), ids=str)
@pytest.mark.parametrize("way", list(TrialWay), ids=lambda way: way.name)
def test_a_kernel_that_gives_the_right_row_is_launched_by_the_driver(way, dtype):
    for count, layout in itertools.product((False, dtype in LOW_PRECISION), (0, 1)):
        driver = Driver(SIZES[way] + bytes((8, 8)), computed_with_hidden(way, dtype, count))
        (first, second, third), notes = tried(driver, way, dtype, count, layout)
        assert (first, third, notes) == (None, None, [])  # the first starts the trial; the reader keeps the second
        assert LAUNCHED_KERNEL.unpack(second)[:4] == (0x1234, 128, 96, len(SIZES[way]))
        ((grid, arguments),) = driver.launches
        assert grid == (0x1234, 1, 1, 1, 128, 1, 1, 96, 7)
        assert arguments[-2:] == [0, 0]  # hidden pointers


def computed_with_hidden(way, dtype, count):
    compute = computed(way, dtype, count)
    return lambda *arguments: compute(*arguments[:-2])


@pytest.mark.parametrize(
    "sizes",
    [READ[:-1], bytes((8, 8, 8, 4, 4, 4)), bytes((8, 4, 8, 4, 4, 4)), READ + bytes((4,)), READ + bytes((8, 8, 8)), b""],
    ids=list,
)
def test_a_kernel_with_other_parameters_is_never_launched(sizes):
    driver = Driver(sizes)
    found, notes = tried(driver)
    assert (found, driver.launches) == ([None] * 3, [])
    assert len(notes) == 1
    assert "bytes, expected [8, 8, 4, 4, 4, 4]" in notes[0]


@pytest.mark.parametrize(
    "odd",
    [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 128}, {"launch_pdl": True}],
    ids=str,
)
def test_a_kernel_that_needs_more_than_a_launch_is_not_launched(odd):
    driver = Driver(READ)
    compiled = SimpleNamespace(function=1, metadata=SimpleNamespace(**{**vars(COMPILED.metadata), **odd}))
    found, notes = tried(driver, compiled=compiled)
    assert (found, driver.launches, len(notes)) == ([None] * 3, [], 1)


def wrong_number(source, rows, position, elements, inner, stride):
    computed(TrialWay.READ, torch.float32, False)(source, rows, position, elements, inner, stride)
    at(rows + 48 * position, 6)[1] += 1


def other_row(source, rows, position, elements, inner, stride):
    computed(TrialWay.READ, torch.float32, False)(source, rows, position - 1, elements, inner, stride)


def one_word_more(source, rows, position, elements, inner, stride):
    computed(TrialWay.READ, torch.float32, False)(source, rows, position, elements, inner, stride)
    at(rows + 48 * (position + 1), 6)[0] = 0


@pytest.mark.parametrize("compute", [wrong_number, other_row, one_word_more, lambda *arguments: None])
def test_a_kernel_that_leaves_anything_else_is_launched_by_triton(compute):
    found, notes = tried(Driver(READ, compute))
    assert found == [None] * 3
    assert notes == [
        "Triton launches gpuwatch's kernels (a trial gave other numbers), which takes more of the host's time"
    ]


def test_a_driver_that_refuses_the_trial_is_not_asked_again():
    driver = Driver(READ, error=201)
    found, notes = tried(driver)
    assert (found, len(driver.launches)) == ([None] * 3, 1)
    assert "cuLaunchKernel returned 201" in notes[0]


def test_an_older_driver_that_does_not_tell_the_parameters_launches_nothing():
    driver = Driver(READ)
    found, notes = tried(SimpleNamespace(cuLaunchKernel=driver.cuLaunchKernel))
    assert (found, driver.launches, len(notes)) == ([None] * 3, [], 1)


@pytest.mark.parametrize("way", [TrialWay.MANY, TrialWay.KEPT], ids=lambda way: way.name)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_trial_stays_within_its_memory_whatever_pointer_the_kernel_takes_for_which(way, order):
    """`read_many`, word by word: each address that it forms is that of the trial's memory."""
    outside, done = [], []

    def compute(*given):
        table, earlier, rows = (given[place] for place in order)
        base = min(given[:3]) - 8 * 64
        word = lambda address: checked(address) and at(address, 1).item()  # noqa: E731

        def checked(address, size=8):
            if not base <= address <= base + 8 * 2048 - size:
                outside.append(address - base)
            return base <= address <= base + 8 * 2048 - size

        entry = table + 64 * (int(word(table) <= 0) - 1)
        _, _, source, position, elements, inner, stride, before = (word(entry + 8 * place) for place in range(8))
        row = rows + 48 * position
        if way is TrialWay.KEPT:
            for index in range(before):
                place = word(earlier + 8 * index)
                checked(place + 16 if place else rows + 48 * index + 16)
            known = word(earlier + 8 * position)
            done.append(all([checked(known, 24), checked(row, 24)]))
        else:
            runs = -(-elements // inner) if inner else 0
            done.append(all([checked(source, 8 * ((runs - 1) * stride + inner)), checked(row, 48)]))

    tried(Driver(MANY, compute), way, torch.float64)
    assert (outside, done) == ([], [True])


@pytest.mark.quick(12)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
@pytest.mark.parametrize("layout", [0, 1])
def test_the_trial_of_a_read_stays_within_its_memory_in_any_order(order, layout):
    fits = []

    def compute(source, rows, *integers):
        position, elements, inner, stride = (integers[place] for place in order)
        for first, second in itertools.permutations((source, rows)):
            last = first + 8 * ((max(1, -(-elements // inner)) - 1) * stride + inner) if inner and elements else first
            base = min(source, rows) - 8 * 64
            fits.append(last <= base + 8 * 2048 and second + 48 * (position + 1) <= base + 8 * 2048)

    tried(Driver(READ, compute), TrialWay.READ, torch.float64, layout=layout)
    assert fits == [True, True]


@pytest.mark.parametrize(
    "given",
    [(), (b"short", 1, 0), (LAUNCHED_KERNEL.pack(1, 128, 0, 2, b"\x08\x08"), 1, 0, 5)],
    ids=["nothing", "no kernel", "an argument is missing"],
)
def test_a_launch_without_all_arguments_is_an_error(given):
    with pytest.raises(TypeError):
        launch(*given)


def test_an_argument_that_does_not_fit_launches_nothing():
    driver = Driver(PACK)
    KernelLauncher(library=driver)
    kernel = LAUNCHED_KERNEL.pack(1, 128, 0, 3, PACK)
    with pytest.raises(OverflowError):
        launch(kernel, 1, 0, 8, 8, 1 << 31)
    with pytest.raises(ValueError):
        launch(kernel, 0, 0, 8, 8, 1)
    assert driver.launches == []
    assert launch(kernel, 3, 0, 8, 8, -1) == 0
    assert [arguments for _, arguments in driver.launches] == [[8, 8, -1]]
