"""A signal's handler that writes while a row is written: every frame is whole, of both."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.recorder_file import RecorderFile
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.tests.interruptions import all_of, interrupt

CODES = all_of(RecorderWriter, RecorderFile)


class Recording:
    """A recorder, and what was written into each of its pages."""

    def __init__(self, path: Path) -> None:
        self.writer = RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=1 << 20, segments=8)
        self.reader = RecorderReader(path)
        self.written: dict[int, list[tuple[int, int, list[int]]]] = {}
        """page -> (index, module, numbers of its rows) of each frame"""

    def frame(self, module: int, rows: int = 2) -> None:
        """Write a frame whose rows have numbers of their own."""
        writer = self.writer
        page = writer.page
        assert page is not None
        numbers = [module * 1000 + row for row in range(rows)]
        packed = [(1, writer.value(number, number, 0), 0, 1, 0, 0) for number in numbers]
        index = writer.frame(module, layout.NOTHING, 0, 0, -1, packed)
        self.written.setdefault(page.number, []).append((index, module, numbers))

    def fill(self, values: int = 0, frames: int = 0) -> None:
        """Leave room for so many in the open segment."""
        if values:
            self.writer.values(layout.VALUES_PER_SEGMENT - values, 0)
        for number in range(layout.FRAMES_PER_SEGMENT - frames if frames else 0):
            self.frame(number, 0)

    def check(self) -> None:
        """Every frame is there once, with its own numbers."""
        for number, frames in self.written.items():
            page = self.reader.page(number)
            values, found = {}, []
            for segment in page.segments:
                for at, value in enumerate(layout.VALUE.iter_unpack(segment.values)):
                    values[segment.value_base + at] = value[0]
                rows = list(layout.ROW.iter_unpack(segment.rows))
                for module, *_, first, count, index in layout.FRAME.iter_unpack(segment.frames):
                    found.append((index, module, [values[row[1]] for row in rows[first : first + count]]))
            assert sorted(found) == sorted(frames)
            assert [index for index, *_ in found] == list(range(len(found)))

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


def in_the_page(recording: Recording) -> None:
    """The handler calls a module in the forward that it interrupts, or a hook of its model's in a backward."""
    if recording.writer.page is not None:
        recording.frame(77)
        recording.frame(78)


def in_a_page_of_its_own(recording: Recording) -> None:
    """The handler runs another model."""
    with recording.writer.aside():
        page = recording.writer.begin_page(5, 0, 0)
        recording.frame(77)
        recording.frame(78)
        recording.writer.end_page(page)


def in_a_full_page(recording: Recording) -> None:
    """What the handler writes needs another segment."""
    if recording.writer.page is not None:
        recording.fill(values=1)
        recording.frame(77)


HANDLERS = [in_the_page, in_a_page_of_its_own, in_a_full_page]


def write(recording: Recording) -> None:
    recording.frame(1)
    recording.frame(2)


def write_beyond_the_segment(recording: Recording) -> None:
    recording.fill(values=1)
    recording.frame(1)
    recording.frame(2)


def write_beyond_the_frames(recording: Recording) -> None:
    recording.frame(3)
    recording.frame(4)


def go_to_another_page(recording: Recording) -> None:
    first = recording.writer.page
    other = recording.writer.begin_page(1, 0, 0)
    recording.frame(1)
    recording.writer.resume_page(first)
    recording.frame(2)
    recording.writer.end_page(other)


@pytest.mark.quick(6)
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("work", [write, write_beyond_the_segment, write_beyond_the_frames, go_to_another_page])
def test_frames_of_a_handler_and_of_what_it_interrupts_are_whole(tmp_path, work, handler):
    places = []
    while len(places) < 10_000:
        recording = Recording(tmp_path / f"{len(places)}")
        recording.writer.begin_page(0, 0, 0)
        if work is write_beyond_the_frames:
            recording.fill(frames=1)
        where = interrupt(CODES, partial(work, recording), partial(handler, recording), len(places))
        if recording.writer.page is not None:
            recording.writer.end_page(recording.writer.page)
        try:
            recording.check()
        except AssertionError as error:
            pytest.fail(f"interrupted at {where}: {error}")
        finally:
            recording.close()
            recording.writer.path.unlink()
        if not where:
            break
        places.append(where)
    assert {each.partition(":")[0] for each in places} >= {"value", "frame"}


def test_events_of_a_handler_and_of_what_it_interrupts_are_all_in_the_log(tmp_path):
    def fault(text: str) -> OwnFault:
        return OwnFault(RunPosition(0), "test", text)

    places = []
    while len(places) < 1000:
        recording = Recording(tmp_path / f"{len(places)}")
        writer = recording.writer
        where = interrupt(
            CODES, partial(writer.append, fault("outer")), partial(writer.append, fault("handler")), len(places)
        )
        writer.append(fault("later"))
        told = [each.message for each in recording.reader.new_entries()[1]]
        recording.close()
        writer.path.unlink()
        if not where:
            break
        places.append(where)
        assert sorted(told) == ["handler", "later", "outer"], where
    assert len(places) > 5


def test_events_of_several_threads_are_all_in_the_log(tmp_path):
    """Some are recorded without the lock of those that write frames: an error of ours must wait for nobody."""
    threads, each = 8, 500
    recording, wrong = Recording(tmp_path / "recorder"), []
    start = threading.Barrier(threads)

    def record(thread: int) -> None:
        try:
            start.wait(60)
            for number in range(each):
                recording.writer.append(OwnFault(RunPosition(0), "test", f"{thread} {number}"))
        except BaseException as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)  # the interpreter changes the thread as often as it can
    try:
        running = [threading.Thread(target=record, args=(thread,)) for thread in range(threads)]
        for one in running:
            one.start()
        for one in running:
            one.join(120)
    finally:
        sys.setswitchinterval(before)
    told = [event.message for event in recording.reader.new_entries()[1]]
    recording.close()
    assert wrong == []
    assert sorted(told) == sorted(f"{thread} {number}" for thread in range(threads) for number in range(each))
