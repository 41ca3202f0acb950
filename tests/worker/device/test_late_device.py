"""A device whose numbers come late, in any order between its streams: the file ends up as the host would write it."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
import torch
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import PENDING, Value
from gpuwatch.tests.fakes.late_device import POISON, HostRead, LateDevice
from gpuwatch.worker.device.device import device_for, is_on_device, late_device
from gpuwatch.worker.device.torch_reader import TorchReader, fresh_rows
from gpuwatch.worker.record.tensor_stats import measure
from hypothesis import given
from hypothesis import strategies as st

from .one_by_one import OneByOne

NAN = math.nan


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def values_of(path, number):
    reader = RecorderReader(path)
    page = reader.page(number)
    reader.close()
    return [Value(*numbers) for segment in page.segments for numbers in layout.VALUE.iter_unpack(segment.values)]


# -- what the twin does ---------------------------------------------------------------------------------------------


@pytest.fixture
def late():
    return LateDevice(0, longest=1000)


def test_a_copy_comes_later_and_an_event_after_it(late):
    target, source = late.staging(2, 3, dtype=torch.int64), late.rows(torch.ones(2, 3, dtype=torch.int64))
    late.copy(source, target)
    event = late.record(0)
    assert not late.query(event)
    assert target.tolist() == [[POISON] * 3] * 2
    assert late.wait(event, 0.0)
    assert target.tolist() == [[1] * 3] * 2


def test_each_stream_is_in_order_and_no_more(late):
    events = []
    for stream in range(8):
        with late.on(stream):
            for _ in range(8):
                late.copy(late.rows(torch.ones(1, 3, dtype=torch.int64)), late.staging(1, 3, dtype=torch.int64))
                events.append((stream, late.record(stream)))
    came = []
    while len(came) < len(events):
        came += [entry for entry in events if late.query(entry[1]) and entry not in came]
    assert all([e for e in came if e[0] == stream] == [e for e in events if e[0] == stream] for stream in range(8))
    assert came != events


def test_memory_that_was_freed_before_the_copy_is_poison(late):
    target = late.staging(1, 3, dtype=torch.int64)
    late.copy(late.rows(torch.ones(1, 3, dtype=torch.int64)), target)  # nobody keeps the source
    late.synchronize(0)
    assert target.tolist() == [[POISON] * 3]


def test_a_copy_reads_its_source_when_it_is_carried_out(late):
    target, source = late.staging(1, 3, dtype=torch.int64), late.rows(torch.ones(1, 3, dtype=torch.int64))
    late.copy(source, target)
    source.fill_(7)
    late.synchronize(0)
    assert target.tolist() == [[7] * 3]


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        lambda rows: rows[0, 0].item(),
        lambda rows: bool((rows > 0).any()),
        lambda rows: int(torch.stack([rows[0], rows[1]]).sum()),
        lambda rows: torch.equal(rows, rows),
    ],
)
def test_the_host_cannot_read_what_is_on_the_device(late, read):
    rows = late.rows(fresh_rows(3, torch.device("cpu")))
    packed = TorchReader().pack(rows, 3)
    for tensor in (rows, packed, rows[1:], packed.clone()):
        with pytest.raises((HostRead, RuntimeError), match=r"reads a number of the device|tensor subclasses"):
            read(tensor)


def test_a_copy_that_would_wait_is_an_error(late):
    source = late.rows(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="would wait"):
        late.copy(source, torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("call", ["copy", "record", "query", "wait", "synchronize"])
def test_nothing_may_be_asked_while_a_graph_is_captured(late, call):
    event = late.record(0)
    calls = {
        "copy": lambda: late.copy(
            late.rows(torch.ones(1, 3, dtype=torch.int64)), late.staging(1, 3, dtype=torch.int64)
        ),
        "record": lambda: late.record(0),
        "query": lambda: late.query(event),
        "wait": lambda: late.wait(event, None),
        "synchronize": lambda: late.synchronize(0),
    }
    late.capturing = True
    with pytest.raises(RuntimeError, match="capturing"):
        calls[call]()


# -- any schedule ---------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.float8_e4m3fn]
STEPS = ["measure", "measure", "together", "host", "again", "again", "page", "resume", "flush", "collect", "finish"]
MORE = ["stream 0", "stream 1", "stream 2", "hold", "release", "capture", "end of capture", "pause"]


def tensor_of(number):
    """Ordinary numbers, zeros, nan, inf, and many dtypes."""
    values = [number, -number / 3, 0.0] + [math.inf] * (number % 7 == 0) + [NAN] * (number % 11 == 0)
    dtype = DTYPES[number % len(DTYPES)]
    return torch.tensor(values if dtype.is_floating_point else values[:3]).to(dtype)


def numbers_of(tensor, count):
    """What the host reader gives; a device shows each nan of a float8 type as the same one."""
    low, high, meta, _ = measure(tensor, count)
    if tensor.element_size() == 1:
        low, high = (0x7FC0_0000 if bits > 0x7F80_0000 else bits for bits in (low, high))
    return low, high, meta


class Schedule:
    """A recorder, a late device, and what each page is to hold in the end."""

    def __init__(self, folder, seed, longest, refuses=""):
        self.path = Path(folder) / "recorder"
        self.recorder = RecorderWriter(
            self.path, rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=4096, segments=128
        )
        self.late = LateDevice(seed, longest=longest, refuses=refuses)
        self.buffer = OneByOne(self.recorder, torch.device("cpu"), driver=self.late)
        self.expected = {}
        self.pages = []
        self.weights = []
        self.number = 0
        self.told = set()
        self.copied = []
        copy = self.late.copy

        def counted(source, target):
            self.copied += range(target.data_ptr(), target.data_ptr() + target.nbytes, layout.VALUE.size)
            copy(source, target)

        self.late.copy = counted
        self.do("page")

    def do(self, step):
        """One thing that a training does."""
        self.number += 1
        number, recorder, buffer, late = self.number, self.recorder, self.buffer, self.late
        page = recorder.page
        if step == "page":
            self.pages.append(recorder.begin_page(0, 0, 0))
            self.expected[self.pages[-1].number] = []
        elif step == "resume":
            recorder.resume_page(self.pages[number % len(self.pages)])
        elif step == "pause":
            recorder.pause_page()
        elif step in ("flush", "finish"):
            getattr(buffer, step)()
        elif step == "collect":
            self.told |= set(buffer.collect())
        elif step == "hold":
            late.held.add(late.current)
        elif step == "release":
            late.held.clear()
        elif step.startswith("stream"):
            late.current = int(step[-1])
        elif step == "together" and page is not None:
            with buffer.together():
                for part in ("measure", "again", "measure", "host"):
                    self.number += 1
                    self.put(part, page.number, number % 3 == 0)
        elif "capture" in step:
            late.capturing = step == "capture"
        elif page is not None:
            self.put(step, page.number, number % 3 == 0)

    def put(self, step, page, count):
        """One more value."""
        values = self.expected[page]
        if step == "measure":
            tensor = tensor_of(self.number)
            index, row = self.buffer.weight(tensor, count)
            if index is not None:
                values.append(numbers_of(tensor, count))
                self.weights.append((tensor, count, row))
        elif step == "again" and self.weights:
            tensor, count, row = self.weights[self.number % len(self.weights)]
            index, _ = self.buffer.weight(tensor, count, row)
            if index is not None:
                values.append(numbers_of(tensor, count))
        elif step == "host":
            index = self.recorder.value(self.number, self.number, 0)
            values.append((self.number, self.number, 0))
        else:
            return
        assert index is None or index == len(values) - 1

    def end(self):
        """Everything arrives."""
        self.late.capturing = False
        self.late.held.clear()
        self.recorder.pause_page()
        self.buffer.finish()
        self.told |= set(self.buffer.collect())


schedules = st.lists(st.sampled_from(STEPS + MORE), max_size=120)


@given(steps=schedules, seed=st.integers(0, 1 << 20), longest=st.sampled_from([0, 3, 40]), direct=st.booleans())
def test_in_the_end_the_file_is_what_the_host_would_have_written(steps, seed, longest, direct):
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(folder, seed, longest, "" if direct else "refused")
        for step in steps:
            schedule.do(step)
        schedule.end()
        buffer = schedule.buffer
        assert {number: values_of(schedule.path, number) for number in schedule.expected} == schedule.expected
        assert not buffer.flying
        assert not any(buffer.pending(number) for number in schedule.expected)
        assert schedule.recorder.fields[HeadField.ROWS_LOST] == 0
        if direct:
            assert len(schedule.copied) == len(set(schedule.copied))
        bad = {number for number, values in schedule.expected.items() if any(meta & 0xFF for _, _, meta in values)}
        assert schedule.told >= bad
        buffer.close()
        schedule.recorder.close()


@given(steps=schedules, seed=st.integers(0, 1 << 20))
def test_what_a_dead_process_leaves_is_right_or_pending(steps, seed):
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(folder, seed, 20)
        for step in steps:
            schedule.do(step)
            if step == "finish" and not schedule.late.capturing and not schedule.late.held:
                assert not any(schedule.buffer.pending(number) for number in schedule.expected)
        schedule.late.die()
        for number, expected in schedule.expected.items():
            found = values_of(schedule.path, number)
            assert len(found) == len(expected)
            for value, numbers in zip(found, expected, strict=True):
                assert value == numbers or value == (0, 0, PENDING)
            if not schedule.buffer.pending(number):
                assert found == expected


# -- the switch -----------------------------------------------------------------------------------------------------


@pytest.fixture
def switch(monkeypatch):
    """Says it anew, as a new process would be told."""

    def say(seed):
        monkeypatch.setenv("GPUWATCH_LATE_DEVICE", seed)
        late_device.cache_clear()

    yield say
    monkeypatch.undo()
    late_device.cache_clear()


def test_the_environment_makes_every_cpu_tensor_late(switch):
    switch("5")
    assert late_device() is device_for(torch.device("cpu"))
    assert is_on_device(torch.ones(1))


def test_without_the_switch_the_cpu_is_the_host(switch):
    switch("")
    assert late_device() is None
    assert not is_on_device(torch.ones(1))
    assert is_on_device(torch.ones(1, device="meta"))


def test_a_seed_is_a_number(switch):
    switch("five")
    with pytest.raises(ValueError, match=r"expected a whole number as the seed in GPUWATCH_LATE_DEVICE, found 'five'"):
        late_device()
