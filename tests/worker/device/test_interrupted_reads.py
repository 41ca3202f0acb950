"""A signal's handler that reads on a device while other tensors are read: each number is in its row, or in none."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import PENDING
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.tests.interruptions import all_of, interrupt
from gpuwatch.worker.device import file_copies
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.file_copies import FileCopies
from gpuwatch.worker.device.queued_rows import QueuedRows
from gpuwatch.worker.device.reader_choice import ReaderChoice
from gpuwatch.worker.device.stream_buffer import StreamBuffer
from gpuwatch.worker.device.torch_reader import TorchReader
from gpuwatch.worker.record.tensor_stats import measure

from .one_by_one import OneByOne

pytestmark = pytest.mark.quick_here(3)

CODES = all_of(DeviceStatsBuffer, QueuedRows, ReaderChoice, StreamBuffer, FileCopies, TorchReader, RecorderWriter.value)
CODES |= all_of(RecorderWriter.values, RecorderWriter.continue_segment, RecorderWriter.resume_page)
ARRIVES = all_of(FileCopies, file_copies._discard)


class Readings:
    """A recorder, and the numbers that were read into each of its pages."""

    def __init__(self, path, driver=None) -> None:
        self.writer = RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0, segments=64)
        self.buffer = OneByOne(self.writer, torch.device("cpu"), driver=driver or LateDevice())
        self.read: list[tuple[int, int, torch.Tensor]] = []
        """(page, index of the value, tensor)"""
        self.rows: dict[int, object] = {}

    def frame(self, *numbers: int) -> None:
        """Read a tensor of each number, the last of them as a weight."""
        tensors = [torch.full((3,), float(number)) for number in numbers]
        page = self.writer.page
        assert page is not None
        earlier = self.rows.get(numbers[-1])
        indices, rows = self.buffer.frame(tensors, [3] * len(tensors), [earlier], False)
        self.rows[numbers[-1]] = rows[0]
        found = zip(indices, tensors, strict=True)
        self.read += [(page.number, index, tensor) for index, tensor in found if index is not None]

    def check(self) -> tuple[int, int]:
        """(how many numbers are in their rows, how many are nowhere and were counted)."""
        self.buffer.finish()
        reader, there, lost = RecorderReader(self.writer.path), 0, 0
        for number, index, tensor in self.read:
            page = reader.page(number)
            values = [value for segment in page.segments for value in layout.VALUE.iter_unpack(segment.values)]
            if values[index][2] == PENDING:
                lost += 1
            else:
                assert values[index] == tuple(measure(tensor)[:3]), (number, index, tensor)
                there += 1
        reader.close()
        counted = self.writer.fields[HeadField.ROWS_LOST] + self.writer.fields[HeadField.ROWS_INTERRUPTED]
        assert lost <= counted
        return there, lost

    def close(self) -> None:
        self.buffer.close()
        self.writer.close()
        self.writer.path.unlink()


def reads_on(readings: Readings) -> None:
    """It calls a module in the forward that it interrupts."""
    if readings.writer.page is not None:
        readings.frame(101, 102)
        readings.frame(103, 104)


def runs_another_model(readings: Readings) -> None:
    with readings.writer.aside():
        page = readings.writer.begin_page(5, 0, 0)
        readings.frame(101, 102)
        readings.writer.end_page(page)
        readings.buffer.flush()


def communicates(readings: Readings) -> None:
    readings.buffer.flush()
    readings.buffer.collect()


def writes_on_the_host(readings: Readings) -> None:
    if readings.writer.page is not None:
        readings.writer.value(7, 7, 7)


HANDLERS = [reads_on, runs_another_model, communicates, writes_on_the_host]


def read(readings: Readings) -> None:
    page = readings.writer.page
    readings.frame(1, 2)
    readings.frame(3, 4)
    readings.buffer.flush()
    readings.writer.resume_page(page)
    readings.frame(5, 2)
    with readings.buffer.together():
        readings.frame(6, 4)
        readings.frame(7, 8)
    readings.frame(9, 2)


def read_beyond_the_segment(readings: Readings) -> None:
    readings.frame(1, 2)
    readings.writer.values(layout.VALUES_PER_SEGMENT - 4, 0)
    readings.frame(3, 4)
    readings.frame(5, 2)


@pytest.mark.quick(4)
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("work", [read, read_beyond_the_segment])
@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
@torch.no_grad()
def test_each_number_is_in_its_row_or_lost(tmp_path, work, handler, every):
    seen, there = [], 0
    while len(seen) < 5000:
        readings = Readings(tmp_path / f"{len(seen)}")
        readings.writer.begin_page(0, 0, 0)
        where = interrupt(CODES, partial(work, readings), partial(handler, readings), every * len(seen))
        try:
            there = max(there, readings.check()[0])
        except AssertionError as error:
            pytest.fail(f"interrupted at {where}: {error}")
        finally:
            readings.close()
        if not where:
            break
        seen.append(where)
    assert len(seen) > 100 // every
    assert there >= 4


class Interrupts(BaseException):
    """What a signal's handler raises, as KeyboardInterrupt."""


def raises() -> None:
    raise Interrupts


@pytest.mark.parametrize("refuses", ["", "not mapped"], ids=["in the file", "through pinned memory"])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@torch.no_grad()
def test_an_exception_while_numbers_arrive_loses_none_and_holds_no_segment(tmp_path, refuses, every):
    """A segment that is held for ever is missing for the numbers to come: in the end the rank has no room."""
    for number in range(0, 5000, every):
        readings = Readings(tmp_path / f"{number}", LateDevice(refuses=refuses))
        readings.writer.begin_page(0, 0, 0)
        for value in (1, 3):
            readings.frame(value, value + 1)
            readings.buffer.flush()
        try:
            interrupt(ARRIVES, readings.buffer.collect, raises, number)
        except Interrupts:
            was_interrupted = True
        else:
            was_interrupted = False
        readings.buffer.collect()
        held = readings.buffer._copies.of_segment, readings.buffer._copies.of_page, readings.buffer.flying
        assert readings.check() == (4, 0) and held == ({}, {}, 0), number
        readings.close()
        if not was_interrupted:
            break
    assert number > 10


class FailsAfterOne(LateDevice):
    """It delivers its first copy, and then no longer answers."""

    answers = 1

    def query(self, event):
        self.answers -= 1
        if self.answers < 0:
            raise RuntimeError("the device has failed")
        return super().query(event)


@torch.no_grad()
def test_what_has_arrived_before_a_device_fails_is_not_lost(tmp_path):
    readings = Readings(tmp_path / "0", FailsAfterOne())
    readings.writer.begin_page(0, 0, 0)
    for value in (1, 3):
        readings.frame(value, value + 1)
        readings.buffer.flush()
    readings.buffer.collect()
    assert readings.writer.fields[HeadField.ROWS_LOST] == 2
    assert readings.buffer.flying == 0
    readings.close()
