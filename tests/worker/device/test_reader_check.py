"""Kernels that are wrong: no number of theirs reaches the file, they are off, and torch's operations read instead.

The kernels run on host memory, and the device is the late one.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import PENDING, Value
from gpuwatch.tests.fakes.host_kernels import HostKernels, HostLauncher, KernelFault
from gpuwatch.tests.fakes.kernel_faults import FAULTS, MissingTail, NanUncounted, NoAbs, StalePack, WrongStride
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.kernel_launcher import launch
from gpuwatch.worker.device.tensor_source import TensorSource, source_of
from gpuwatch.worker.device.torch_reader import TorchReader, fresh_rows
from gpuwatch.worker.device.triton_reader import TritonReader
from gpuwatch.worker.record.tensor_stats import measure
from torch.utils._python_dispatch import TorchDispatchMode

from ..conftest import Watched, use_late_device
from .native_reads import READS, NativeReads
from .one_by_one import OneByOne
from .test_device_buffer import values_of

pytestmark = pytest.mark.quick_here(14)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Rank:
    """A rank that reads with these kernels."""

    def __init__(self, folder, kernels, with_driver=False, dtype=torch.float16, device=None):
        self.recorder = RecorderWriter(folder / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)
        self.kernels, self.device, self.dtype = kernels, device or LateDevice(3), dtype
        faults = []
        library = kernels if with_driver else SimpleNamespace()  # a driver that lacks what is needed
        self.reader = TritonReader(kernels, HostLauncher(library=library, add_fault=faults.append))
        self.buffer = OneByOne(self.recorder, torch.device("cpu"), driver=self.device, reader=self.reader)
        self.reader.checks = self.buffer.checks
        self.native = NativeReads(self.recorder, self.buffer) if READS else None
        self._faults, self.expected, self.kept = faults, {}, []

    @property
    def faults(self):
        return self._faults + self.buffer.faults

    def batch(self, *tensors, weights=(), rows=None):
        """A page of a batch with some ordinary tensors and these; collected. Returns the weights' rows."""
        self.page = self.recorder.begin_page(0, 0, 0)
        ordinary = [self.numbers(4200), self.numbers(37), self.numbers(900).view(30, 30)[:, 4:11], *tensors]
        for tensor in ordinary:
            assert self.buffer.measure(tensor, True) is not None
        with self.buffer.together():
            waiting = [self.numbers(4200), self.numbers(70), self.numbers(10).add(NAN)]
            for tensor in waiting:
                assert self.buffer.measure(tensor, True) is not None
        pair = [self.numbers(64), self.numbers(600)]
        if self.native is not None:  # two tensors that are alike: one launch reads both
            assert self.native.read(pair) is not None
            self.native.rows.late_pages.clear()
        else:
            assert self.buffer.frame(pair, [0, 0], [], True)
        found = [
            self.buffer.weight(weight, True, row)[1]
            for weight, row in zip(weights, rows or [None] * len(weights), strict=True)
        ]
        self.expected[self.page.number] = [
            Value(*measure(tensor, True)[:3]) for tensor in (*ordinary, *waiting, *pair, *weights)
        ]
        self.kept.append((ordinary, waiting, pair))
        self.recorder.end_page(self.page)
        self.buffer.flush()
        self.buffer.collect()
        return found

    def numbers(self, size):
        found = (torch.arange(size) * 7 % 23 - 11).to(self.dtype) / 3
        found[0], found[-1] = 1 / 7, -9
        return found

    def arrived(self):
        """(what is right in the file, what is missing, what is wrong), as numbers of values"""
        self.device.deliver()
        self.buffer.collect()
        right = missing = wrong = 0
        for number, expected in self.expected.items():
            found = values_of(self.recorder, number)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                right += one == other
                missing += one.meta == PENDING
                wrong += one != other and one.meta != PENDING
        return right, missing, wrong


class TorchDispatchCounter(TorchDispatchMode):
    """The script's own mode: it sees the script's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


def weights_of(rank):
    return [torch.nn.Parameter(rank.numbers(size)) for size in (300, 41, 7)]


@each_fault
def test_a_kernel_that_is_wrong_is_off_and_none_of_its_numbers_counts(tmp_path, fault):
    rank = Rank(tmp_path, HostKernels(ordinary=fault()))
    weights, rows = weights_of(rank), None
    for _ in range(3):
        rows = rank.batch(weights=weights, rows=rows)
        assert rank.arrived()[2] == 0
    assert isinstance(rank.buffer._reader, TorchReader)
    assert len(rank.faults) == 1
    assert "read known numbers wrongly on cpu" in rank.faults[0]
    lost = rank.arrived()[1]
    assert rank.recorder.fields[HeadField.ROWS_LOST] == lost > 0

    rank.batch(torch.tensor([1.0, INF, -INF]).half(), weights=weights, rows=rows)  # an overflow after it
    right, missing, wrong = rank.arrived()
    assert (missing, wrong, right) == (lost, 0, sum(map(len, rank.expected.values())) - lost)
    assert rank.buffer.faults == rank.faults


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("with_driver", [False, True], ids=["Triton launches", "the driver launches"])
def test_a_reader_that_is_right_stays_on_and_loses_nothing(tmp_path, dtype, with_driver):
    if with_driver and launch is None:
        pytest.skip("worker/native was not built where gpuwatch was installed")
    kernels = HostKernels()
    rank = Rank(tmp_path, kernels, with_driver=with_driver, dtype=dtype)
    weights, rows = weights_of(rank), None
    for batch in range(8):
        rank.device.deliver()
        before = dict(kernels.launches)
        rows = rank.batch(*([rank.numbers(70).mul(INF)] if batch == 6 else []), weights=weights, rows=rows)
    assert rank.buffer.note == ""
    assert rank.faults == []
    assert rank.buffer._reader is rank.reader
    assert rank.arrived()[1:] == (0, 0)
    done = {way: number - before[way] for way, number in kernels.launches.items()}
    assert done["ordinary" if with_driver else "direct"] == 0
    assert rank.recorder.fields[HeadField.ROWS_LOST] == 0


@pytest.mark.skipif(launch is None, reason="worker/native was not built where gpuwatch was installed")
@each_fault
def test_a_launch_through_the_driver_that_is_wrong_never_reads_a_tensor(tmp_path, fault):
    kernels = HostKernels(direct=fault())
    rank = Rank(tmp_path, kernels, with_driver=True)
    weights, rows = weights_of(rank), None
    for _ in range(5):
        rows = rank.batch(weights=weights, rows=rows)
        assert rank.arrived()[1:] == (0, 0)
    assert rank.buffer._reader is rank.reader
    assert not rank.reader.reads
    assert not rank.reader._kernels
    assert len(rank.faults) == 1
    assert rank.faults[0].startswith("Triton launches gpuwatch's kernels (")

    before = kernels.launches["direct"]
    rank.batch(torch.tensor([1.0, INF, -INF]).half(), weights=weights, rows=rows)
    assert rank.arrived()[1:] == (0, 0)
    assert kernels.launches["direct"] == before


class Raises(KernelFault):
    def before(self, name, given):
        raise RuntimeError("no kernel image is available")


def test_a_check_that_raises_turns_the_kernels_off(tmp_path):
    rank = Rank(tmp_path, HostKernels(ordinary=Raises()))
    for _ in range(2):
        rank.batch(torch.tensor([1.0, INF, -INF]).half())
        assert rank.arrived()[1:] == (0, 0)
    assert isinstance(rank.buffer._reader, TorchReader)
    assert "torch's operations read each tensor instead" in rank.buffer.note
    assert "no kernel image is available" in rank.buffer.note


def test_a_weight_keeps_no_number_of_a_kernel_that_was_wrong(tmp_path):
    rank = Rank(tmp_path, HostKernels(ordinary=NoAbs()))
    (weight, *_), row = weights_of(rank), None
    for number in range(2):  # nothing before it is bad, so that it would keep its numbers
        page = rank.recorder.begin_page(0, 0, number)
        _, row = rank.buffer.weight(weight, False, row)
        rank.recorder.end_page(page)
        rank.buffer.flush()
        rank.device.deliver()
        rank.buffer.collect()
        rank.device.deliver()
    assert isinstance(rank.buffer._reader, TorchReader)
    assert values_of(rank.recorder, page.number) == [Value(*measure(weight)[:3])]


def test_rows_that_were_not_sent_when_a_kernel_was_found_wrong_are_lost(tmp_path):
    rank = Rank(tmp_path, HostKernels(ordinary=NoAbs()))
    page = rank.recorder.begin_page(0, 0, 0)
    rank.buffer.measure(rank.numbers(40))
    rank.device.deliver()
    rank.buffer.collect()
    assert isinstance(rank.buffer._reader, TorchReader)
    rank.buffer.measure(rank.numbers(41))
    rank.recorder.end_page(page)
    rank.buffer.flush()
    rank.device.deliver()
    assert values_of(rank.recorder, page.number) == [Value(0, 0, PENDING), Value(*measure(rank.numbers(41))[:3])]
    assert rank.recorder.fields[HeadField.ROWS_LOST] == 1


def test_nothing_is_asked_of_any_stream_while_one_is_captured(tmp_path):
    rank, asked = Rank(tmp_path, HostKernels()), []
    with rank.device.on(1):
        rank.batch()
    assert rank.buffer.checks.running
    query, rank.device.query = rank.device.query, asked.append
    rank.device.captured = {0}
    rank.buffer.collect()
    rank.buffer.checks.judge()
    assert asked == []
    rank.device.captured, rank.device.query = set(), query
    assert rank.arrived()[1:] == (0, 0)


def test_passed_tensors_of_a_kernel_that_was_wrong_are_lost(tmp_path):
    rank = Rank(tmp_path, HostKernels(ordinary=NanUncounted()))
    tensors = [torch.ones(8), torch.full((8,), NAN)]
    before, _ = rank.buffer.passed.read(tensors, "sent")
    rank.buffer.passed.flush()
    unsent, _ = rank.buffer.passed.read(tensors, "not sent")
    rank.device.deliver()
    rank.buffer.collect()
    assert rank.buffer.passed.collect() == []
    assert (before.is_lost, before.numbers, unsent.is_lost, rank.buffer.passed.unseen) == (True, None, True, True)

    after, _ = rank.buffer.passed.read(tensors, "after")
    rank.buffer.passed.flush()
    rank.device.deliver()
    assert rank.buffer.passed.collect() == [after]
    assert after.numbers == [tuple(measure(tensor)[:3]) for tensor in tensors]


@pytest.mark.parametrize("fault", [KernelFault, NoAbs], ids=["right", "wrong"])
def test_a_graph_is_read_once_the_kernels_that_it_captured_are_proven(tmp_path, fault):
    rank = Rank(tmp_path, HostKernels(ordinary=fault()))
    tensor, rows = rank.numbers(50), torch.zeros(8, 6, dtype=torch.int64)
    rank.device.held.add(0)  # a stream on which nothing gets on
    rank.batch()
    rank.buffer.captured.is_on = True
    rank.buffer.captured.prepare(torch.device("cpu"))
    rank.device.capturing = True
    reads = rank.buffer.captured.begin(torch.device("cpu"), rank.buffer.checks.running)
    assert rank.reader.read_known(source_of(tensor), rows, 2, False)
    rank.buffer.collect()  # asks the device nothing
    rank.device.capturing = False
    assert reads.unproven
    assert not rank.buffer.checks.have_passed(reads.unproven)
    rank.device.held.clear()
    rank.device.deliver()
    assert rank.buffer.checks.have_passed(reads.unproven) is (fault is KernelFault)
    rank.buffer.collect()
    assert rank.buffer.checks.have_passed(reads.unproven) is (fault is KernelFault)


def test_numbers_of_another_stream_wait_for_a_check_of_their_own(tmp_path):
    """Neither stream waits for the other, and nothing is lost."""
    rank = Rank(tmp_path, HostKernels())
    rank.device.held.add(0)
    rank.batch()
    with rank.device.on(1):
        rank.batch()
        second = rank.page.number
        rank.device.deliver()
        rank.buffer.collect()
        assert values_of(rank.recorder, second) == rank.expected[second]
    rank.device.held.clear()
    assert rank.arrived()[1:] == (0, 0)
    assert rank.faults == []


@pytest.mark.parametrize("fault", [NoAbs, MissingTail, StalePack], ids=lambda fault: fault.__name__)
def test_no_wrong_number_is_in_the_file_while_the_host_is_elsewhere(tmp_path, fault):
    """The rank never asks again, as one that hangs: what its node finds in the file was replaced on the device."""
    rank = Rank(tmp_path, HostKernels(ordinary=fault()))
    page = rank.recorder.begin_page(0, 0, 0)
    tensors = [rank.numbers(4200), rank.numbers(37)]
    for tensor in tensors:
        rank.buffer.measure(tensor)
    rank.buffer.flush()
    rank.device.deliver()
    assert values_of(rank.recorder, page.number) == [Value(0, 0, PENDING)] * 2


def test_a_check_takes_no_random_number_and_leaves_the_modes_as_they_are(tmp_path):
    rank = Rank(tmp_path, HostKernels())
    rank.native = None  # it reads nothing below a mode
    before = torch.get_rng_state()
    with torch.inference_mode(), TorchDispatchCounter() as seen:
        rank.batch()
    assert torch.equal(torch.get_rng_state(), before)
    assert seen.names & {"aten.all.default", "aten.eq.Tensor"} == set()
    rank.batch()  # outside of inference mode
    assert rank.arrived()[1:] == (0, 0)


@pytest.mark.parametrize(
    ("ordinary", "direct"), [(KernelFault, KernelFault), (NoAbs, KernelFault), (KernelFault, NoAbs)], ids=str
)
def test_a_kernel_for_sizes_of_64_bits_reads_once_the_driver_launches_it(tmp_path, ordinary, direct):
    """Of one run, so that its stride is never used."""
    if launch is None:
        pytest.skip("worker/native was not built where gpuwatch was installed")
    kernels = HostKernels(ordinary=ordinary(), direct=direct())
    rank, tensor = Rank(tmp_path, kernels, with_driver=True), torch.tensor([1.0, -9.0, NAN, 2.0, 0.5])
    for _ in range(5):
        rows = fresh_rows(3, torch.device("cpu"))
        before = kernels.launches["direct"]
        rank.reader.read(TensorSource(tensor, 5, 5, 1 << 31), rows, 1, False)
        assert tuple(rows[1, :3].tolist()) == tuple(measure(tensor)[:3])
        rank.device.deliver()
    assert kernels.launches["direct"] - before == (direct is KernelFault)
    assert len(rank.reader.reads) == (direct is KernelFault)
    assert len(rank.faults) == (direct is not KernelFault)


# -- copies ---------------------------------------------------------------------------------------------------------


class WrongCopies(LateDevice):
    """Copies into registered memory bring the numbers of the copy before."""

    last = None

    def copy(self, source, target):
        first, end = self._direct
        if first <= target.data_ptr() < end and target.data_ptr() + target.nbytes <= end:
            last, self.last = self.last, self.rows(source.clone())
            source = last if last is not None and last.shape == source.shape else self.last
        super().copy(source, target)


def test_copies_into_the_file_that_are_wrong_are_found_mended_and_not_made_again(tmp_path):
    rank = Rank(tmp_path, HostKernels(), device=WrongCopies(3))
    for size in range(20, 26):
        rank.batch(torch.ones(size).half() * size)
        assert rank.arrived()[1:] == (0, 0)
    assert len(rank.faults) == 1
    assert rank.faults[0].startswith("copies from cpu into the recorder's memory have other numbers")
    assert rank.buffer._reader is rank.reader


def test_the_first_copies_are_compared_and_no_later_ones(tmp_path):
    rank = Rank(tmp_path, HostKernels())
    copies = []
    for _ in range(12):
        before = rank.device.copies
        rank.batch()
        assert rank.arrived()[1:] == (0, 0)
        copies.append(rank.device.copies - before)
    assert copies[-3:] == [1, 1, 1]
    assert copies[1] >= 2
    assert rank.faults == []


# -- a whole watch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [WrongStride, NanUncounted, StalePack], ids=lambda fault: fault.__name__)
def test_an_overflow_after_a_kernel_that_was_wrong_is_reported_with_the_right_numbers(
    tmp_path, monkeypatch, capfd, fault
):
    def best_reader(buffer):
        reader = TritonReader(HostKernels(ordinary=fault()), HostLauncher(library=SimpleNamespace()))
        reader.checks = buffer.checks
        return reader

    use_late_device(monkeypatch, LateDevice(5))
    monkeypatch.setattr(DeviceStatsBuffer, "_best_reader", best_reader)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Linear(40, 3))
    watched = Watched(tmp_path / "recorder", watch=("forward", "weights"))
    try:
        for _ in range(4):
            model(torch.ones(9, 16)[:, 4:12])
            watched.collect()
        assert watched.anomalies == []
        large = torch.full((9, 16), 3e38)[:, 4:12]
        model(large)
        row = watched.row("0", "output")
        found = watched.facts()
    finally:
        watched.close()
    (rank,) = found.ranks.values()
    assert [(one.where.batch, one.module, one.phase) for one in rank.anomalies] == [(4, "0", "forward")]
    with torch.no_grad():
        output = torch.nn.functional.linear(large, model[0].weight, model[0].bias)
    assert (row.nan, row.posinf, row.neginf) == (bool(output.isnan().any()), True, True)
    assert row.abs_min == pytest.approx(output.abs().min().item())
    assert [fault.part for fault in rank.faults] == ["self-check"]
    assert capfd.readouterr().err.count("[GW614]") == 1
