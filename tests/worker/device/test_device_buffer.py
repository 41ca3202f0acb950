"""TensorStats that stay on the device until they are copied: here on the late device, and with -m gpu on CUDA."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy
import pytest
import torch
from gpuwatch.core.judge import WarningLimits
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import COUNTED, DTYPE_MAX, PENDING, NonFinite, Value, ValueEncoding, headroom
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.device.file_copies import runs
from gpuwatch.worker.device.tensor_source import KINDS
from gpuwatch.worker.device.torch_reader import TorchReader
from gpuwatch.worker.record.notable import NotableFilter
from gpuwatch.worker.record.tensor_stats import measure
from torch.utils._python_dispatch import TorchDispatchMode

from .native_reads import READS, NativeReads
from .one_by_one import OneByOne

pytestmark = pytest.mark.quick_here(45)

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def recorder(tmp_path):
    return RecorderWriter(tmp_path / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)


@pytest.fixture
def small(tmp_path):
    """A recorder whose ring goes round after eight segments."""
    return RecorderWriter(tmp_path / "small", rank=0, local_rank=0, world_size=1, attempt=0, segments=8)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def the_driver_lets_go_of_each_file():
    """Else the next file may be mapped to addresses that are registered already."""
    yield
    while _on_cuda:
        _on_cuda.pop().close()


_on_cuda = []


def device_buffer(recorder, device, **more):
    if device != "cuda":
        return OneByOne(recorder, torch.device("cpu"), **{"driver": LateDevice(), **more})
    _on_cuda.append(OneByOne(recorder, torch.device("cuda", torch.cuda.current_device()), **more))
    return _on_cuda[-1]


def values_of(recorder, number):
    """The values of a page as its readers see them."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    reader = RecorderReader(recorder.path)
    page = reader.page(number)
    reader.close()
    if page is None:
        return None
    return [Value(*numbers) for segment in page.segments for numbers in layout.VALUE.iter_unpack(segment.values)]


def arrived(pages):
    if pages.device.type == "cuda":
        torch.cuda.synchronize()
    return pages.collect()


def page_with(recorder, pages, *tensors, count=False):
    """A page of its own with these tensors; its number."""
    page = recorder.begin_page(0, 0, 0)
    for tensor in tensors:
        assert pages.measure(tensor, count) is not None
    recorder.end_page(page)
    return page.number


def test_positions_become_runs():
    assert runs([]) == []
    assert runs([0, 1, 2, 5, 6, 9]) == [(0, 3), (5, 7), (9, 10)]


# -- the way into the file ------------------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_numbers_are_in_the_file_as_the_host_would_have_put_them(recorder, device, dtype, count):
    pages = device_buffer(recorder, device)
    tensor = torch.tensor([[-3, 0, 2, 1, 1e-7]]).to(dtype)
    number = page_with(recorder, pages, tensor.to(device), count=count)

    assert values_of(recorder, number) == [Value(*measure(tensor, count)[:3])]
    assert arrived(pages) == []


@each_device
def test_a_value_is_pending_until_its_segment_is_done(recorder, device):
    pages = device_buffer(recorder, device)
    page = recorder.begin_page(0, 0, 0)
    pages.measure(torch.ones(3, device=device))
    assert [value.meta for value in values_of(recorder, 0)] == [PENDING]
    recorder.end_page(page)
    assert [value.abs_max for value in values_of(recorder, 0)] == [1.0]


@each_device
def test_a_page_of_many_segments_arrives_whole(recorder, device):
    pages = device_buffer(recorder, device)
    page_with(recorder, pages, *(torch.tensor(float(i), device=device) for i in range(1000)))
    assert [value.abs_max for value in values_of(recorder, 0)] == list(range(1000))


@each_device
def test_values_of_the_host_in_between_stay_what_they_are(recorder, device):
    pages = device_buffer(recorder, device)
    page = recorder.begin_page(0, 0, 0)
    for i in range(600):
        if i % 3:
            recorder.value(i, i, ValueEncoding.INTEGER << 8)
        else:
            pages.measure(torch.tensor(i, device=device))
    recorder.end_page(page)
    assert [value.abs_max for value in values_of(recorder, 0)] == list(range(600))


@each_device
def test_what_cannot_be_measured_takes_no_value(recorder, device):
    pages = device_buffer(recorder, device)
    recorder.begin_page(0, 0, 0)
    assert pages.measure(torch.empty(0, device=device)) is None
    assert pages.measure(torch.empty(3, device="meta")) is None
    assert recorder.value_position == -1


@each_device
def test_the_first_tensor_in_inference_mode(recorder, device):
    """What is made in there could not be written to later."""
    with torch.inference_mode():
        pages = device_buffer(recorder, device)
        page_with(recorder, pages, torch.ones(2, device=device))
    page_with(recorder, pages, torch.full((2,), 2.0, device=device))
    with torch.inference_mode():
        page_with(recorder, pages, torch.full((2,), 3.0, device=device))
    assert [values_of(recorder, number)[0].abs_max for number in range(3)] == [1.0, 2.0, 3.0]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@each_device
def test_no_mode_of_the_scripts_sees_the_copies(recorder, device):
    pages = device_buffer(recorder, device, notable=UNDERFLOW)
    page = recorder.begin_page(0, 0, 0)
    pages.measure(torch.ones(2, device=device), count=True)
    with Operations() as operations, torch.device("meta"):
        pages.flush()
        recorder.end_page(page)
        arrived(pages)
        pages.finish()
    assert operations.seen == []
    assert values_of(recorder, 0)[0].abs_max == 1.0


# -- what is told of it ---------------------------------------------------------------------------------------------


@each_device
def test_each_kind_of_non_finite_value_is_told(recorder, device):
    pages = device_buffer(recorder, device)
    cases = [[1.0, INF], [1.0, -INF], [INF, -INF], [NAN, 1.0], [NAN, INF], [1.0, 2.0]]
    for values in cases:
        page_with(recorder, pages, torch.tensor(values, device=device))

    flags = [values_of(recorder, number)[0].flags for number in range(len(cases))]
    both = NonFinite.POSINF | NonFinite.NEGINF
    assert flags == [NonFinite.POSINF, NonFinite.NEGINF, both, NonFinite.NAN, NonFinite.NAN | NonFinite.POSINF, 0]
    assert arrived(pages) == [0, 1, 2, 3, 4]
    assert arrived(pages) == []


@each_device
def test_a_page_is_told_again_when_more_of_it_arrives(recorder, device):
    pages = device_buffer(recorder, device)
    fine, bad = torch.ones(2, device=device), torch.full((2,), NAN, device=device)
    first = recorder.begin_page(0, 0, 0)
    pages.measure(fine)
    second = recorder.begin_page(0, 1, 0)
    pages.measure(bad)
    recorder.resume_page(first)
    assert arrived(pages) == [1]
    pages.measure(fine)
    recorder.pause_page()
    assert arrived(pages) == []
    recorder.resume_page(second)
    pages.measure(bad)
    recorder.resume_page(first)
    pages.measure(bad)
    recorder.end_page(first)
    assert arrived(pages) == [0, 1]
    assert [len(values_of(recorder, number)) for number in (0, 1)] == [3, 2]


def test_what_is_still_on_its_way_is_not_told(recorder):
    late = LateDevice()
    late.held = {0}
    pages = device_buffer(recorder, "cpu", driver=late)
    page = recorder.begin_page(0, 0, 0)
    assert not pages.pending(page.number)
    pages.measure(torch.tensor(NAN))
    assert pages.pending(page.number)
    recorder.end_page(page)
    assert (pages.collect(), pages.flying, pages.pending(0)) == ([], 1, True)
    assert not pages.pending(1)
    late.held.clear()
    assert (pages.collect(), pages.flying, pages.pending(0)) == ([0], 0, False)


NEAR = NotableFilter(WarningLimits(near_overflow=1.0))
UNDERFLOW = NotableFilter(WarningLimits(underflow_share=0.1))
BOTH = NotableFilter(WarningLimits(1.0, 0.1))


@each_device
@pytest.mark.parametrize(
    ("values", "dtype", "told"),
    [
        ([32768.0], torch.float16, True),
        ([-40000.0, 1.0], torch.float16, True),
        ([32736.0], torch.float16, False),
        ([65504.0], torch.float16, False),  # what masks are filled with
        ([INF], torch.float16, True),
        ([2.0**127], torch.bfloat16, True),
        ([65504.0], torch.float32, False),
        ([300.0], torch.float8_e4m3fn, True),
        ([100.0], torch.float8_e4m3fn, False),
        ([32768.0], torch.float8_e5m2, True),
        ([16384.0], torch.float8_e5m2, False),
        ([3e38], torch.complex64, True),
        ([1.0], torch.complex64, False),
        ([2e5], torch.int64, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("again", [False, True])
def test_pages_near_overflow_are_told(recorder, device, values, dtype, told, again):
    pages = device_buffer(recorder, device, notable=NEAR)
    page = recorder.begin_page(0, 0, 0)
    weight = torch.tensor(values, device=device).to(dtype)
    _, row = pages.weight(weight)
    pages.measure(torch.ones(2, device=device))
    recorder.end_page(page)
    assert arrived(pages) == [0] * told
    assert arrived(pages) == []
    if again:
        page = recorder.begin_page(0, 1, 0)
        pages.weight(weight, earlier=row)
        recorder.end_page(page)
        assert arrived(pages) == [1] * told


@each_device
@pytest.mark.parametrize(
    ("values", "count", "told"),
    [
        ([1e-7] + 9 * [1.0], True, True),
        (10 * [1.0], True, False),
        ([1e-7] + 9 * [1.0], False, False),
        ([1e-7] + 10 * [1.0], True, False),
        (10 * [0.0], True, True),
        (9 * [0.0] + [1.0], True, False),
    ],
)
def test_pages_in_underflow_and_with_vanished_tensors_are_told(recorder, device, values, count, told):
    pages = device_buffer(recorder, device, notable=UNDERFLOW)
    page_with(recorder, pages, torch.tensor(values, dtype=torch.float16, device=device), count=count)
    assert arrived(pages) == [0] * told


@pytest.mark.parametrize("powers", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [dtype for dtype in KINDS if dtype.is_floating_point] + [torch.complex64], ids=str)
def test_the_filter_misses_no_number_that_is_near_overflow(dtype, powers):
    """All numbers around the limit: each with so little headroom that the judge may warn is notable."""
    name = str(dtype).removeprefix("torch.")
    largest = DTYPE_MAX.get(name, 0.0)
    around = largest * 2.0**-powers * (1 + torch.linspace(-1e-2, 1e-2, 101, dtype=torch.float64))
    notable = NotableFilter(WarningLimits(near_overflow=powers))
    limit = notable.wide_limit(dtype)
    for tensor in around.to(dtype).reshape(-1, 1):
        value = Value(*measure(tensor)[:3])
        room = headroom(value.abs_max, name)
        if room is not None and room <= powers and value.abs_max != largest:
            assert notable.any(numpy.array([value])) or (limit is not None and value.high >= limit)


# -- weights that keep the numbers of an earlier reading ------------------------------------------------------------


class CountsReads(TorchReader):
    """Knows what was read alone, and what together with others."""

    def __init__(self):
        self.alone = 0
        self.together = []

    def read(self, source, rows, position, count):
        self.alone += 1
        super().read(source, rows, position, count)

    def read_many(self, readings, rows):
        self.together.append(readings)
        super().read_many(readings, rows)


@each_device
@pytest.mark.parametrize("seen_to_arrive", [False, True])
@pytest.mark.parametrize("something_is_bad", [False, True])
def test_a_weight_is_read_again_only_where_something_is_non_finite(recorder, device, seen_to_arrive, something_is_bad):
    pages = device_buffer(recorder, device)
    weight = torch.tensor([40000.0, 0.0, 1e-7, 3.0], dtype=torch.float16, device=device)
    page = recorder.begin_page(0, 0, 0)
    index, row = pages.weight(weight, count=True)
    assert index == 0
    recorder.end_page(page)
    if seen_to_arrive:
        assert arrived(pages) == []
    before = tuple(measure(weight.cpu(), True)[:3])

    weight.data[3] = INF  # a version counter that does not move, as when a bit flips
    for number in (1, 2):
        page = recorder.begin_page(0, 1, 0)
        pages.measure(torch.tensor([1.0, NAN if something_is_bad else 2.0], device=device))
        index, row = pages.weight(weight, count=True, earlier=row)
        assert index == 1
        pages.measure(torch.tensor(NAN, device=device))  # later: it says nothing about the weight
        recorder.end_page(page)
        now = tuple(measure(weight.cpu(), True)[:3])
        assert values_of(recorder, number)[1] == (now if something_is_bad else before)
    assert arrived(pages) == [1, 2]


@pytest.mark.parametrize("where", ["this stream", "another stream", "the first frame of a segment", "not yet packed"])
def test_a_weight_is_read_where_its_earlier_numbers_do_not_help(recorder, where):
    late, reader = LateDevice(), CountsReads()
    pages = device_buffer(recorder, "cpu", driver=late, reader=reader)
    weight = torch.tensor([1.0, -2.0])
    page = recorder.begin_page(0, 0, 0)
    _, row = pages.weight(weight)
    if where != "not yet packed":
        pages.flush()
    late.current = 1 if where == "another stream" else 0
    if where == "the first frame of a segment":  # what the frame read before may be in the other segment
        for number in range(layout.VALUES_PER_SEGMENT):
            pages.measure(torch.tensor(float(number)))
    alone = reader.alone
    pages.weight(weight, earlier=row)
    assert reader.alone - alone == (where != "this stream")
    recorder.end_page(page)
    pages.finish()
    assert len(reader.together) == (where == "this stream")
    assert values_of(recorder, 0)[-1] == tuple(measure(weight)[:3])


# -- frames of the native writer ------------------------------------------------------------------------------------


needs_native = pytest.mark.skipif(not READS, reason="worker/native was not built, or this torch lends it no tensors")


@needs_native
@each_device
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("count", [False, True])
def test_a_frame_of_the_native_writer_has_its_values_side_by_side(recorder, device, together, count):
    pages = device_buffer(recorder, device)
    reads = NativeReads(recorder, pages)
    tensors = [torch.full((3,), float(each), dtype=torch.float16, device=device) for each in range(1, 5)]
    weights = [torch.nn.Parameter(tensor) for tensor in tensors[2:]]
    page = recorder.begin_page(0, 0 if count else 1, 0)
    pages.measure(torch.tensor(7.0, device=device))
    with pages.together() if together else nullcontext():
        index = reads.read(tensors[:2], weights)
    pages.flush()
    again = reads.read([torch.tensor(9.0, device=device)], weights)
    recorder.end_page(page)
    found = values_of(recorder, 0)
    measured = [measure(tensor.cpu(), count)[:3] for tensor in tensors]
    assert (index, again) == (1, 5)
    assert found[1:5] == measured
    assert found[5].abs_max == 9.0
    assert found[6:] == measured[2:]


@needs_native
def test_a_frame_that_does_not_fit_begins_the_next_segment(recorder):
    pages = device_buffer(recorder, "cpu", driver=LateDevice(3))
    reads = NativeReads(recorder, pages)
    page = recorder.begin_page(0, 0, 0)
    tensors = [torch.tensor(float(each)) for each in range(7)]
    indices = [reads.read(tensors) for _ in range(100)]
    recorder.end_page(page)
    pages.finish()
    in_a_segment = layout.VALUES_PER_SEGMENT // 7
    assert indices == list(range(0, 700, 7))
    assert [value.abs_max for value in values_of(recorder, 0)] == [float(each) for each in range(7)] * 100
    assert recorder.fields[HeadField.SEGMENT] == -(-100 // in_a_segment) - 1


@needs_native
@pytest.mark.parametrize("where", ["another stream", "not yet packed", "a captured graph", "after a captured graph"])
def test_what_the_native_writer_cannot_know_is_left_to_python(recorder, where):
    late = LateDevice()
    pages = device_buffer(recorder, "cpu", driver=late)
    reads = NativeReads(recorder, pages)
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    page = recorder.begin_page(0, 0, 0)
    assert reads.read([torch.tensor(3.0)], [weight]) == 0
    if where == "after a captured graph":
        late.capturing = True
        recorder.end_page(page)  # the segment cannot be sent now
        late.capturing = False
        recorder.begin_page(0, 1, 0)
    elif where != "not yet packed":
        pages.flush()
    late.current = 1 if where == "another stream" else 0
    late.capturing = where == "a captured graph"
    before = recorder.value_count
    assert reads.read([torch.tensor(4.0)], [weight]) is None
    assert recorder.value_count == before
    assert len(pages._buffers[0, 0].weights) == 0


@needs_native
def test_an_error_of_the_device_leaves_the_frame_to_python(recorder):
    class Refuses(TorchReader):
        def read(self, *about):
            raise RuntimeError("an illegal memory access")

    pages = device_buffer(recorder, "cpu", reader=Refuses())
    reads = NativeReads(recorder, pages)
    recorder.begin_page(0, 0, 0)
    with pytest.raises(AssertionError):  # not even `device_frame` was asked
        reads.read([torch.tensor(4.0)])
    assert not reads.asked
    assert pages.has_unsent


@needs_native
@pytest.mark.parametrize("seq", [0, 3])
def test_readings_before_a_collective_are_sent_first(recorder, seq):
    pages = device_buffer(recorder, "cpu")
    reads = NativeReads(recorder, pages, issued=seq)
    sent = []
    reads.rows._send_after_collectives = lambda *about: sent.append(about)
    recorder.begin_page(0, 0, 0)
    assert reads.read([torch.tensor(4.0)]) == 0
    assert sent == ([(pages, 3)] if seq else [])


# -- many tensors in one launch -------------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("number", [1, 200, 1000])
def test_tensors_of_one_section_are_read_by_one_launch_for_each_segment(recorder, device, number):
    reader = CountsReads()
    pages = device_buffer(recorder, device, reader=reader)
    page = recorder.begin_page(0, 0, 0)
    pages.measure(torch.tensor(7.0, device=device))
    with pages.together():
        for each in range(number):
            pages.measure(torch.full((each % 5 + 1,), float(each), device=device))  # nobody else keeps it
        assert pages.measure(torch.empty(0, device=device)) is None
    pages.flush()
    assert reader.alone == 1
    assert len(reader.together) == (number + 1 + layout.VALUES_PER_SEGMENT - 1) // layout.VALUES_PER_SEGMENT
    recorder.end_page(page)
    assert [value.abs_max for value in values_of(recorder, 0)] == [7.0, *range(number)]


def test_each_stream_of_a_section_has_a_launch_of_its_own(recorder):
    late, reader = LateDevice(3), CountsReads()
    pages = device_buffer(recorder, "cpu", driver=late, reader=reader)
    page = recorder.begin_page(0, 0, 0)
    with pages.together():
        for each in range(30):
            late.current = each % 3
            pages.measure(torch.tensor(float(each)))
    assert [len(readings.tensors) for readings in reader.together] == [10, 10, 10]
    recorder.end_page(page)
    pages.finish()
    assert [value.abs_max for value in values_of(recorder, 0)] == list(range(30))


class TwoDevices(LateDevice):
    """Has a stream 0 on each device. A test says which device is meant."""

    number = 0

    def stream_key(self, device):
        super().stream_key(device)
        return self.number, 0

    def use(self, key, stream):
        assert key == (self.number, 0) or self.number == -1
        return super().use(key, stream)


def test_every_device_of_a_process_is_read(recorder):
    """Not only that of the first tensor."""
    late, reader = TwoDevices(), CountsReads()
    pages = device_buffer(recorder, "cpu", driver=late, reader=reader)
    page = recorder.begin_page(0, 0, 0)
    for each in range(10):
        late.number = each % 2
        pages.measure(torch.tensor(float(each)))
    late.number = -1
    recorder.end_page(page)
    pages.finish()
    assert len(pages._buffers) == 2
    assert [value.abs_max for value in values_of(recorder, 0)] == list(range(10))


def weights_seen_again(recorder, reader, number=5):
    """(buffer, weights, their page): each weight was read, has changed without a new version, and is seen again."""
    late = LateDevice()
    pages = device_buffer(recorder, "cpu", driver=late, reader=reader)
    weights = [torch.full((3,), float(each)) for each in range(number)]
    page = recorder.begin_page(0, 0, 0)
    rows = [pages.weight(weight)[1] for weight in weights]
    recorder.end_page(page)
    page = recorder.begin_page(0, 1, 0)
    pages.measure(torch.tensor(NAN))  # so that they are read again
    for weight, row in zip(weights, rows, strict=True):
        weight.data[0] = 100.0
        pages.weight(weight, earlier=row)
    return pages, weights, page


def test_weights_seen_again_wait_for_one_launch_at_the_flush(recorder):
    reader = CountsReads()
    _, _, page = weights_seen_again(recorder, reader)
    assert reader.together == []
    recorder.end_page(page)
    assert [len(readings.tensors) for readings in reader.together] == [5]
    assert [value.abs_max for value in values_of(recorder, 1)][1:] == [100.0] * 5


def test_a_weight_that_is_gone_or_changed_since_keeps_its_numbers(recorder):
    """None of them is kept alive; FSDP frees the memory of weights that are; an optimizer has gone on with another."""
    reader = CountsReads()
    _, weights, page = weights_seen_again(recorder, reader)
    weights[1].untyped_storage().resize_(0)
    weights[2].add_(1000.0)
    weights[3].data = torch.full((70,), 200.0)  # other memory of another size, which is read as it is
    del weights[0]
    recorder.end_page(page)
    assert [value.abs_max for value in values_of(recorder, 1)][1:] == [0.0, 1.0, 2.0, 200.0, 100.0]


def test_weights_whose_memory_is_about_to_be_freed_are_dealt_with_before(recorder):
    reader = CountsReads()
    pages, weights, page = weights_seen_again(recorder, reader)
    pages.read_waiting()
    for weight in weights:
        weight.untyped_storage().resize_(0)
    recorder.end_page(page)
    assert len(reader.together) == 1
    assert [value.abs_max for value in values_of(recorder, 1)][1:] == [100.0] * 5


def test_weights_wait_while_a_graph_is_captured(recorder):
    reader = CountsReads()
    pages, _, page = weights_seen_again(recorder, reader)
    pages._driver.capturing = True
    pages.read_waiting()
    pages.flush()
    recorder.end_page(page)
    with pages.together():
        assert pages.measure(torch.tensor(1.0)) is None
    assert reader.together == []
    pages._driver.capturing = False
    page = recorder.begin_page(0, 2, 0)
    pages.measure(torch.tensor(3.0))
    recorder.end_page(page)
    assert [len(readings.tensors) for readings in reader.together] == [5]
    assert [value.abs_max for value in values_of(recorder, 1)][1:] == [100.0] * 5


def test_a_launch_for_many_that_fails_loses_their_rows_and_no_others(recorder):
    reader = SometimesBroken()
    pages = device_buffer(recorder, "cpu", reader=reader)
    page = recorder.begin_page(0, 0, 0)
    reader.fails = "read_many"
    with pytest.raises(RuntimeError, match="no room"), pages.together():
        for _ in range(3):
            pages.measure(torch.tensor(NAN))
    reader.fails = ""
    recorder.end_page(page)
    assert recorder.fields[HeadField.ROWS_LOST] == 3
    assert [value.meta for value in values_of(recorder, 0)] == [PENDING] * 3
    assert not pages.pending(0)
    number = page_with(recorder, pages, torch.tensor(2.0))
    assert values_of(recorder, number) == [measure(torch.tensor(2.0))[:3]]


# -- a device that is far behind ------------------------------------------------------------------------------------


def test_each_stream_brings_its_own_rows(recorder):
    late = LateDevice()
    pages = device_buffer(recorder, "cpu", driver=late)
    page = recorder.begin_page(0, 0, 0)
    late.held = {0, 2}
    for number in range(500):
        late.current = number % 7 % 3
        pages.measure(torch.tensor(number))
    late.current = 1
    pages.measure(torch.tensor(NAN))
    recorder.end_page(page)
    assert pages.collect() == [0]
    assert pages.flying > 0
    late.held = set()
    assert pages.collect() == []
    assert pages.flying == 0
    assert [value.high for value in values_of(recorder, 0)][:-1] == [*range(500)]


def test_a_segment_is_not_used_again_before_its_copy_has_arrived(small):
    late = LateDevice()
    pages = device_buffer(small, "cpu", driver=late)
    late.held = {0}
    page_with(small, pages, torch.tensor(7.0))
    late.current = 1
    for number in range(1, 40):
        page_with(small, pages, torch.tensor(float(number)))
        pages.collect()
    assert pages.flying == 1
    assert values_of(small, 0)[0].meta == PENDING
    assert [values_of(small, number)[0].abs_max for number in range(33, 40)] == list(range(33, 40))
    assert small.fields[HeadField.ROWS_LOST] == 0

    late.held = set()
    pages.collect()
    assert values_of(small, 0)[0].abs_max == 7.0
    for number in range(40, 48):
        page_with(small, pages, torch.tensor(float(number)))
    assert values_of(small, 0) is None
    assert [values_of(small, number)[0].abs_max for number in range(40, 48)] == list(range(40, 48))


def test_a_device_that_does_not_answer_costs_rows_and_nothing_else(small):
    late = LateDevice()
    late.held = {0}
    pages = device_buffer(small, "cpu", driver=late)
    for number in range(30):
        page_with(small, pages, torch.tensor(float(number)), torch.tensor(NAN))
        pages.collect()
    assert pages.flying == 4
    assert small.fields[HeadField.ROWS_LOST] == 26 * 2
    assert [value.meta for value in values_of(small, 29)] == [PENDING, PENDING]
    assert not pages.pending(29)
    pages.finish(timeout_s=0.0)
    assert pages.flying

    late.held = set()
    assert pages.collect() == [0, 1, 2, 3]
    assert [values_of(small, number)[0].abs_max for number in range(4)] == [0.0, 1.0, 2.0, 3.0]
    page_with(small, pages, torch.tensor(5.0))
    assert values_of(small, 30)[0].abs_max == 5.0


def test_rows_wait_while_a_graph_is_captured(recorder):
    late = LateDevice()
    pages = device_buffer(recorder, "cpu", driver=late)
    first = recorder.begin_page(0, 0, 0)
    weight = torch.tensor(NAN)
    _, row = pages.weight(weight)
    late.capturing = True
    assert pages.measure(torch.tensor(1.0)) is None
    assert pages.weight(weight, earlier=row) == (None, None)
    assert pages.not_seen_in_graphs == 2
    assert "does not say when a graph is captured" in pages.why_not_seen
    pages.flush()
    pages.finish()
    recorder.end_page(first)
    assert pages.collect() == []
    assert pages.pending(first.number)
    page = recorder.begin_page(0, 1, 0)
    recorder.end_page(page)
    late.capturing = False
    page = recorder.begin_page(0, 2, 0)
    pages.measure(torch.tensor(3.0))
    assert pages.collect() == [0]
    recorder.end_page(page)
    assert [values_of(recorder, number) and values_of(recorder, number)[0].high for number in range(3)] == [
        measure(torch.tensor(NAN)).high,
        [],
        measure(torch.tensor(3.0)).high,
    ]


def test_a_stream_that_is_captured_while_another_one_is_current_is_left_alone(recorder, monkeypatch):
    monkeypatch.setattr("gpuwatch.worker.device.file_copies._MOST_COMPARED", 0)
    late = LateDevice()
    pages = device_buffer(recorder, "cpu", driver=late)
    page = recorder.begin_page(0, 0, 0)
    for stream in (0, 1):
        late.current = stream
        pages.measure(torch.tensor(float(stream)))
    late.current, late.captured, late.held = 0, {1}, {0}
    pages.flush()
    assert (late.copies, pages.flying) == (1, 1)
    late.current, late.captured = 2, {0}
    assert pages.collect() == []
    pages.finish()
    assert (late.copies, pages.flying) == (2, 1)  # that of stream 0 was not asked for
    late.captured, late.held = set(), set()
    pages.finish()
    assert (pages.flying, pages.pending(0)) == (0, False)
    assert [value.abs_max for value in values_of(recorder, 0)] == [0.0, 1.0]

    late.current = 1
    _, row = pages.weight(torch.tensor(5.0))
    late.current, late.captured = 0, {1}
    recorder.end_page(page)
    assert recorder.fields[HeadField.ROWS_LOST] == 1
    late.captured = set()
    page = recorder.begin_page(0, 1, 0)
    late.current = 1
    pages.weight(torch.tensor(2.0), earlier=row)
    recorder.end_page(page)
    pages.finish()
    assert [value.abs_max for value in values_of(recorder, 1)] == [2.0]


def test_a_default_device_of_the_scripts_does_not_matter(recorder):
    """With set_default_device("cuda") a tensor of ours that names no device would be made there."""
    values, weight = torch.tensor([2.0, NAN]), torch.tensor([1.0, 3.0], dtype=torch.float16)
    late = LateDevice(0, longest=3, refuses="refused")
    torch.set_default_device("meta")
    try:
        pages = device_buffer(recorder, "cpu", driver=late, notable=BOTH)
        page = recorder.begin_page(0, 0, 0)
        pages.measure(values)
        _, row = pages.weight(weight, count=True)
        pages.flush()
        pages.weight(weight, count=True, earlier=row)
        pages.finish()
        recorder.end_page(page)
        assert pages.collect() == [0]
    finally:
        torch.set_default_device(None)
    assert values_of(recorder, 0) == [measure(values)[:3]] + 2 * [measure(weight, True)[:3]]


# -- flush and finish -----------------------------------------------------------------------------------------------


@each_device
def test_a_flush_brings_what_is_there_and_the_segment_goes_on(recorder, device):
    pages = device_buffer(recorder, device)
    page = recorder.begin_page(0, 0, 0)
    for number in range(10):
        for part in range(3):
            pages.measure(torch.tensor(3 * number + part, device=device))
        pages.flush()
        assert [value.high for value in values_of(recorder, 0)] == list(range(3 * number + 3))
        assert arrived(pages) == []
        assert not pages.pending(page.number)
    recorder.end_page(page)
    assert pages.flying == 0
    assert page.segments == 1


def test_what_was_flushed_is_not_copied_again(recorder, monkeypatch):
    monkeypatch.setattr("gpuwatch.worker.device.file_copies._MOST_COMPARED", 0)
    late = LateDevice()
    pages = device_buffer(recorder, "cpu", driver=late)
    page = recorder.begin_page(0, 0, 0)
    pages.flush()
    assert late.copies == 0
    weight = torch.tensor(1.0)
    _, row = pages.weight(weight)
    pages.flush()
    pages.flush()
    assert late.copies == 1
    pages.weight(weight, earlier=row)
    pages.measure(torch.tensor(2.0))
    recorder.end_page(page)
    assert late.copies == 2
    assert [value.abs_max for value in values_of(recorder, 0)] == [1.0, 1.0, 2.0]


@each_device
def test_finish_waits_for_everything(recorder, device):
    late = LateDevice(0, longest=1000)
    pages = device_buffer(recorder, device, driver=late if device == "cpu" else None)
    page = recorder.begin_page(0, 0, 0)
    for stream in range(3):
        late.current = stream
        pages.measure(torch.tensor([float(stream), NAN], device=device))
    assert pages.collect() == []
    pages.finish()
    assert (pages.flying, pages.pending(page.number)) == (0, False)
    assert [value.flags for value in values_of(recorder, 0)] == [NonFinite.NAN] * 3
    assert pages.collect() == [0]


def test_a_flush_into_a_full_ring_waits_for_room(small):
    late = LateDevice()
    pages = device_buffer(small, "cpu", driver=late)
    late.held = {0}
    for number in range(4):
        page_with(small, pages, torch.tensor(float(number)))
    page = small.begin_page(0, 4, 0)
    pages.measure(torch.tensor(4.0))
    pages.flush()
    assert pages.flying == 4
    late.held = set()
    pages.measure(torch.tensor(5.0))
    pages.flush()
    assert [value.abs_max for value in values_of(small, page.number)] == [4.0, 5.0]
    assert small.fields[HeadField.ROWS_LOST] == 0


# -- when something does not work -----------------------------------------------------------------------------------


class Broken:
    """A Triton without a compiler: nothing is launched."""

    def read(self, *_):
        raise RuntimeError("Failed to find C compiler")

    read_many = pack = read


class SometimesBroken(TorchReader):
    """A device that is out of memory now and then."""

    fails = ""

    def read(self, source, rows, position, count):
        if self.fails == "read":
            raise RuntimeError("no room")
        super().read(source, rows, position, count)

    def read_many(self, readings, rows):
        if self.fails == "read_many":
            raise RuntimeError("no room")
        super().read_many(readings, rows)

    def pack(self, rows, count):
        if self.fails == "pack":
            raise RuntimeError("no room")
        return super().pack(rows, count)


@pytest.mark.parametrize("reader", [Broken, type("LateBroken", (Broken,), {"read": TorchReader.read})])
def test_without_a_kernel_torchs_operations_do_it(recorder, reader):
    pages = device_buffer(recorder, "cpu", reader=reader())
    with pages.together():
        number = page_with(recorder, pages, torch.tensor([1.0, -INF]))
    assert values_of(recorder, number) == [measure(torch.tensor([1.0, -INF]))[:3]]
    assert "RuntimeError: Failed to find C compiler" in pages.note
    assert "about 30 launches" in pages.note


class DeadDevice(LateDevice):
    """A device after an assert in one of its kernels: every call says so."""

    def asked(self, *_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    query = wait = synchronize = asked


@pytest.mark.parametrize("call", ["collect", "finish", "close"])
def test_a_device_that_has_failed_is_told_once_and_never_waited_for(recorder, call):
    late = DeadDevice(0, longest=1000)
    pages = device_buffer(recorder, "cpu", driver=late)
    page = recorder.begin_page(0, 0, 0)
    pages.measure(torch.tensor(NAN))
    pages.flush()
    for _ in range(2):
        getattr(pages, call)()
        assert pages.note.count("device-side assert triggered") == 1
        assert (pages.flying, pages.pending(page.number)) == (0, False)


def test_where_torchs_operations_fail_as_well_the_kernel_is_not_to_blame(recorder):
    reader = Broken()
    pages = device_buffer(recorder, "cpu", reader=reader)
    recorder.begin_page(0, 0, 0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="device-side"):
        patch.setattr(TorchReader, "read", DeadReader.read)
        pages.measure(torch.tensor(NAN))
    assert pages.note == ""


class DeadReader:
    """What reads on a device that has failed."""

    def read(self, source, rows, position, count):
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("fails", ["read", "pack"])
def test_after_an_error_of_torchs_own_the_next_numbers_are_right(recorder, fails):
    reader = SometimesBroken()
    pages = device_buffer(recorder, "cpu", reader=reader)
    page = recorder.begin_page(0, 0, 0)
    pages.measure(torch.tensor(3.0))
    reader.fails = fails
    with pytest.raises(RuntimeError, match="no room"):
        pages.measure(torch.tensor(NAN))
        recorder.pause_page()
    reader.fails = ""
    recorder.end_page(page)
    assert [value.meta for value in values_of(recorder, 0)][1] == PENDING
    number = page_with(recorder, pages, torch.tensor(2.0), torch.tensor(1.0))
    assert values_of(recorder, number) == [measure(torch.tensor(value))[:3] for value in (2.0, 1.0)]
    assert arrived(pages) == []


@each_device
def test_closing_lets_go_of_the_file(recorder, device):
    pages = device_buffer(recorder, device)
    page_with(recorder, pages, torch.ones(1, device=device))
    pages.close()
    recorder.begin_page(0, 1, 0)
    recorder.pause_page()
    recorder.close()
    assert pages.flying == 0


def test_closing_does_not_wait_for_ever_and_the_device_may_still_write(recorder):
    driver = LateDevice()
    pages = device_buffer(recorder, "cpu", driver=driver)
    driver.held.add(0)
    page_with(recorder, pages, torch.ones(1))
    recorder.begin_page(0, 1, 0)  # ends the segment: the copy is started
    recorder.pause_page()
    assert pages.flying
    memory = recorder.memory
    pages.close()
    assert "a stream has not ended" in pages.note
    assert recorder.fields[HeadField.ROWS_LOST] == 1
    recorder.close()
    assert not memory.closed
    driver.synchronize(0)  # the copy arrives


# -- on CUDA only ---------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_cuda
def test_nothing_waits_for_the_device(recorder):
    pages = device_buffer(recorder, "cuda", notable=BOTH)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
    tensors = [torch.ones(5000, device="cuda").to(dtype) for dtype in dtypes]
    page_with(recorder, pages, *tensors, count=True)  # compiled now
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            page = recorder.begin_page(0, 0, 0)
            with pages.together():
                for tensor in tensors:
                    _, row = pages.weight(tensor, count=True)
            page = recorder.begin_page(0, 0, 0)
            pages.weight(tensor, earlier=row)
            recorder.end_page(page)
            pages.collect()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pages.note == ""
    assert {value.abs_max for value in values_of(recorder, 9)} == {1.0}


@pytest.mark.gpu
@on_cuda
def test_a_busy_stream_holds_up_no_other(recorder):
    pages = device_buffer(recorder, "cuda")
    tensor = torch.ones(100, device="cuda")
    page_with(recorder, pages, tensor)  # compiled now
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    weight = tensor * 2
    torch.cuda.synchronize()
    page = recorder.begin_page(0, 0, 0)
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
        _, row = pages.weight(weight)
    with torch.cuda.stream(free):
        pages.measure(tensor * NAN)
    recorder.end_page(page)
    free.synchronize()
    assert pages.collect() == [1]
    assert not busy.query()
    page = recorder.begin_page(0, 0, 0)
    with torch.cuda.stream(free):
        pages.weight(weight, earlier=row)
    recorder.end_page(page)
    free.synchronize()
    assert not busy.query()
    assert values_of(recorder, 2)[0].abs_max == 2.0
    assert [value.abs_max for value in values_of(recorder, 1)][:1] == [2.0]


@pytest.mark.gpu
@on_cuda
def test_hooks_of_a_backward_run_on_autograds_thread(recorder):
    pages = device_buffer(recorder, "cuda")
    threads = set()
    stream = torch.cuda.Stream()

    def hook(gradient):
        threads.add(threading.get_ident())
        with torch.no_grad():
            pages.measure(gradient)

    with torch.enable_grad(), torch.cuda.stream(stream):
        x = torch.ones(1000, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        z = (y * 3e38).sum() * 10
    page = recorder.begin_page(0, 0, 0)
    z.backward()
    recorder.end_page(page)
    assert threads != {threading.get_ident()}
    assert values_of(recorder, 0)[0].flags == NonFinite.POSINF
    assert arrived(pages) == [0]


@pytest.mark.gpu
@on_cuda
def test_a_captured_graph_is_as_the_user_wrote_it(recorder):
    pages = device_buffer(recorder, "cuda")
    x = torch.ones(1000, device="cuda")
    page = recorder.begin_page(0, 0, 0)
    pages.measure(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        assert pages.measure(y) is None
        recorder.end_page(page)
        pages.collect()
    graph.replay()
    page = recorder.begin_page(0, 0, 0)
    pages.measure(y)
    recorder.end_page(page)
    assert [values_of(recorder, number)[0].abs_max for number in range(2)] == [1.0, 2.0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_two_devices(recorder):
    pages = device_buffer(recorder, "cuda")
    page_with(recorder, pages, torch.ones(10, device="cuda:0"), torch.full((10,), -INF, device="cuda:1"))
    torch.cuda.synchronize(1)
    assert [value.abs_max for value in values_of(recorder, 0)] == [1.0, INF]
    assert COUNTED & values_of(recorder, 0)[0].meta == 0
