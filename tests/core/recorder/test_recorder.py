"""The writer and the reader against each other, over a real file."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptError, ScriptExit
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.layout import HeadField, RankPhase
from gpuwatch.core.recorder.reader import HeldPage, NotReady, RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from hypothesis import given, settings
from hypothesis import strategies as st

_numbers = itertools.count()


@contextlib.contextmanager
def open_pair(folder: Path, **sizes):
    path = folder / f"{next(_numbers)}.recorder"
    writer = RecorderWriter(path, rank=3, local_rank=1, world_size=8, attempt=2, **{"log_bytes": 1 << 16, **sizes})
    reader = RecorderReader(path)
    try:
        yield writer, reader
    finally:
        writer.close()
        reader.close()
        path.unlink()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recorders")


def last_page(reader):
    """The newest page, finished or not."""
    number = reader[HeadField.PAGE]
    return reader.page(number) if number >= 0 else None


def tables(page):
    """A page as plain lists: frames with their rows, and values by index."""
    values, frames = {}, []
    for segment in page.segments:
        for offset, numbers in enumerate(layout.VALUE.iter_unpack(segment.values)):
            values[segment.value_base + offset] = numbers
        rows = list(layout.ROW.iter_unpack(segment.rows))
        for module, parent, depth, phase, collectives, seq, first, count, index in layout.FRAME.iter_unpack(
            segment.frames
        ):
            frames.append((index, module, parent, depth, phase, seq, rows[first : first + count], collectives))
    return frames, values


# -- one page -----------------------------------------------------------------------------------------------------

ROW = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
    st.integers(0, 5),
    st.integers(0, 65535),
)
FRAME = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 32767),
    st.integers(0, 6),
    st.integers(-1, 2**62),
    st.lists(ROW, max_size=6),
    st.integers(0, 255),
)
VALUE = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3)


@given(st.lists(st.one_of(FRAME, VALUE), max_size=60))
def test_a_page_is_read_as_it_was_written(folder, calls):
    frames, values = [], {}
    with open_pair(folder, segments=8) as (writer, reader):
        open_page = writer.begin_page(root=4, batch=9, step=7)
        for call in calls:
            if len(call) == 3:
                values[writer.value(*call)] = call
            else:
                frames.append((writer.frame(*call), *call))
        writer.end_page(open_page)
        page = reader.page(open_page.number)
    assert (page.rank, page.attempt, page.number, page.root, page.batch, page.step) == (3, 2, 0, 4, 9, 7)
    assert (open_page.frames, open_page.values) == (len(frames), len(values))
    assert page.complete
    assert tables(page) == (frames, values)


@given(frames=st.integers(1, 500), rows=st.integers(0, 40), values=st.integers(0, 3))
@settings(max_examples=25)
def test_a_page_that_is_bigger_than_a_segment_keeps_every_frame(folder, frames, rows, values):
    with open_pair(folder, segments=128) as (writer, reader):
        page = writer.begin_page(0, 0, 0)
        written = []
        for module in range(frames):
            indexes = [writer.value(module, value, 0) for value in range(values)]
            table = [(slot, indexes[-1] if indexes else layout.NOTHING, 0, 1, 0, 0) for slot in range(rows)]
            written.append((writer.frame(module, layout.NOTHING, 0, 0, -1, table), module, table))
        writer.end_page(page)
        got, numbers = tables(reader.page(page.number))
    assert [(index, module, table) for index, module, *_, table, _ in got] == written
    assert len(numbers) == frames * values
    for index, module, *_, table, _ in got:
        assert all(numbers[row[1]][0] == module for row in table if values), index


def test_a_page_that_is_open_is_read_as_far_as_it_got(folder):
    with open_pair(folder, segments=4) as (writer, reader):
        open_page = writer.begin_page(0, 5, 0)
        assert tables(last_page(reader)) == ([], {})
        writer.frame(1, layout.NOTHING, 0, 0, 3, [(0, writer.value(1, 2, 3), 0, 1, 0, 2)], 7)
        page = last_page(reader)
        assert not page.complete
        assert tables(page) == ([(0, 1, layout.NOTHING, 0, 0, 3, [(0, 0, 0, 1, 0, 2)], 7)], {0: (1, 2, 3)})
        writer.end_page(open_page)
        assert last_page(reader).complete


def test_a_new_page_comes_in_between_and_does_not_end_the_one_before(folder):
    """A loss module is called while the batch of the model is not over: its backward is still to come."""
    with open_pair(folder, segments=4) as (writer, reader):
        first = writer.begin_page(0, 0, 0)
        second = writer.begin_page(1, 0, 0)
        assert (reader.page(first.number).complete, reader.page(second.number).complete) == (False, False)
        writer.end_page(first)
        assert (reader.page(first.number).complete, reader.page(second.number).complete) == (True, False)
        assert writer.page is second


def test_more_collectives_than_a_byte_holds_are_the_most_it_holds(folder):
    with open_pair(folder, segments=1) as (writer, reader):
        writer.begin_page(0, 0, 0)
        for collectives in (0, 255, 256, 70_000):
            writer.frame(0, layout.NOTHING, 0, 0, 0, [], collectives)
        frames, _ = tables(last_page(reader))
        assert [frame[-1] for frame in frames] == [0, 255, 255, 255]


def test_rows_that_no_segment_can_hold_are_counted(folder):
    with open_pair(folder, segments=4) as (writer, reader):
        writer.begin_page(0, 0, 0)
        writer.frame(1, layout.NOTHING, 0, 0, 0, [(slot, 0, 0, 0, 0, 0) for slot in range(layout.ROWS_PER_SEGMENT + 7)])
        (frame,), _ = tables(last_page(reader))
        assert len(frame[-2]) == layout.ROWS_PER_SEGMENT
        assert reader.state().rows_lost == 7


# -- the ring -----------------------------------------------------------------------------------------------------


def test_the_ring_keeps_the_newest_pages(folder):
    with open_pair(folder, segments=3) as (writer, reader):
        for batch in range(10):
            page = writer.begin_page(0, batch, batch)
            writer.frame(batch, layout.NOTHING, 0, 0, 0, [])
            writer.end_page(page)
        assert [reader.page(number) is not None for number in range(10)] == [False] * 7 + [True] * 3
        assert tables(last_page(reader))[0][0][1] == 9


def test_a_frame_is_a_movement_also_when_the_ring_has_come_round(folder):
    with open_pair(folder, segments=2) as (writer, reader):
        for batch in range(3):
            writer.begin_page(0, batch, 0)
            before = reader.movement()
            writer.frame(0, 0, 0, 0, 0, [])
            assert reader.movement() != before, f"batch {batch}"


def test_of_a_page_bigger_than_the_ring_the_end_is_left_with_its_true_indexes(folder):
    with open_pair(folder, segments=2) as (writer, reader):
        page = writer.begin_page(0, 0, 0)
        total = 4 * layout.FRAMES_PER_SEGMENT
        for module in range(total):
            writer.frame(module, layout.NOTHING, 0, 0, 0, [(0, writer.value(module, 0, 0), 0, 0, 0, 0)])
        writer.end_page(page)
        frames, values = tables(last_page(reader))
    assert [frame[0] for frame in frames] == list(range(frames[0][0], total))
    assert frames[0][0] > 0
    assert all(values[row[1]][0] == module for _, module, *_, (row,), _ in frames if row[1] in values)


def test_what_the_ring_holds_is_listed_without_its_tables(folder):
    with open_pair(folder, segments=3) as (writer, reader):
        assert reader.held() == []
        for batch in range(3):
            for root in range(2):
                page = writer.begin_page(root, batch, 0)
                writer.value(1, 2, 3)
                writer.frame(0, layout.NOTHING, 0, 0, 0, [])
                writer.frame(0, layout.NOTHING, 0, 0, 0, [])
            writer.end_page(page)
        assert reader.held() == [
            HeldPage(number=3, root=1, batch=1, complete=True, frames=2, values=1),
            HeldPage(number=4, root=0, batch=2, complete=False, frames=2, values=1),
            HeldPage(number=5, root=1, batch=2, complete=True, frames=2, values=1),
        ]
        writer.resume_page(page)
        writer.value(1, 2, 3)
        assert reader.held() == [
            HeldPage(number=4, root=0, batch=2, complete=False, frames=2, values=1),
            HeldPage(number=5, root=1, batch=2, complete=False, frames=2, values=2),
        ]


# -- pages that are written on in ---------------------------------------------------------------------------------


def call(writer: RecorderWriter, name: int, phase: int = 0) -> None:
    """A frame with one row; all its numbers are `name`."""
    writer.frame(name, layout.NOTHING, 0, phase, name, [(name, writer.value(name, name, name), name, 1, 0, 0)])


def names_in(page) -> list[int]:
    """The names of a page's calls, each of which must be whole."""
    frames, values = tables(page)
    for _, name, _, _, _, seq, (row,), _ in frames:
        assert seq == row[0] == row[2] == name
        assert values[row[1]] == (name, name, name)
    assert [frame[0] for frame in frames] == list(range(frames[0][0], frames[0][0] + len(frames))) if frames else True
    return [frame[1] for frame in frames]


def test_a_forward_a_loss_and_the_backward_are_two_pages_each_in_its_order(folder):
    with open_pair(folder, segments=8) as (writer, reader):
        model = writer.begin_page(root=0, batch=5, step=4)
        call(writer, 10)
        call(writer, 11)
        loss = writer.begin_page(root=1, batch=5, step=4)
        call(writer, 20)
        assert last_page(reader).number == loss.number
        writer.resume_page(model)
        assert writer.page is model
        call(writer, 12, phase=1)
        assert (last_page(reader).number, reader.state().batch, reader[HeadField.ROOT]) == (model.number, 5, 0)
        writer.resume_page(loss)
        call(writer, 21, phase=1)
        writer.resume_page(model)
        call(writer, 13, phase=1)

        page = reader.page(model.number)
        assert names_in(page) == [10, 11, 12, 13]
        assert [segment.index for segment in page.segments] == [0, 1, 2]
        assert [(segment.frame_base, segment.value_base) for segment in page.segments] == [(0, 0), (2, 2), (3, 3)]
        assert (page.root, page.batch, page.step, page.complete) == (0, 5, 4, False)
        page = reader.page(loss.number)
        assert names_in(page) == [20, 21]
        assert (page.root, page.complete) == (1, False)


def test_resuming_the_page_that_is_being_written_makes_no_new_segment(folder):
    with open_pair(folder, segments=8) as (writer, reader):
        page = writer.begin_page(0, 0, 0)
        call(writer, 1)
        writer.resume_page(page)
        call(writer, 2)
        assert len(reader.page(page.number).segments) == page.segments == 1


def test_a_page_that_was_paused_goes_on_after_nothing_came_in_between(folder):
    with open_pair(folder, segments=8) as (writer, reader):
        page = writer.begin_page(0, 0, 0)
        call(writer, 1)
        writer.pause_page()
        assert writer.page is None
        writer.pause_page()
        writer.resume_page(page)
        call(writer, 2)
        assert names_in(reader.page(page.number)) == [1, 2]
        assert page.segments == 2


def test_a_page_that_is_ended_while_another_is_written_is_complete(folder):
    with open_pair(folder, segments=8) as (writer, reader):
        first = writer.begin_page(0, 0, 0)
        call(writer, 1)
        writer.begin_page(1, 0, 0)
        call(writer, 2)
        writer.end_page(first)
        call(writer, 3)
        assert reader.page(first.number).complete
        assert names_in(reader.page(first.number)) == [1]
        assert names_in(last_page(reader)) == [2, 3]


@pytest.mark.parametrize("how", ["paused", "another begins", "another goes on", "ended again"])
def test_a_page_that_was_ended_and_goes_on_is_complete_once_it_rests(folder, how):
    """In a pipeline the backward of a batch comes after the forward of the next."""
    with open_pair(folder, segments=8) as (writer, reader):
        first = writer.begin_page(0, 0, 0)
        call(writer, 1)
        writer.end_page(first)
        second = writer.begin_page(0, 1, 0)
        assert reader.page(first.number).complete
        writer.resume_page(first)
        call(writer, 2)
        assert not reader.page(first.number).complete
        if how == "paused":
            writer.pause_page()
        elif how == "another begins":
            writer.begin_page(0, 2, 0)
        elif how == "another goes on":
            writer.resume_page(second)
        else:
            writer.end_page(first)
        assert reader.page(first.number).complete
        assert names_in(reader.page(first.number)) == [1, 2]
        assert not reader.page(second.number).complete


def test_ending_a_page_that_the_ring_has_overwritten_touches_nothing(folder):
    with open_pair(folder, segments=2) as (writer, reader):
        gone = writer.begin_page(0, 0, 0)
        call(writer, 1)
        for batch in (1, 2):
            writer.begin_page(0, batch, 0)
            call(writer, 10 + batch)
        assert reader.page(gone.number) is None
        before = bytes(writer.memory)
        writer.end_page(gone)
        assert bytes(writer.memory) == before
        assert gone.ended


def test_a_page_is_still_ended_in_the_last_place_that_the_ring_leaves_it(folder):
    with open_pair(folder, segments=2) as (writer, reader):
        first = writer.begin_page(0, 0, 0)
        writer.begin_page(0, 1, 0)
        writer.end_page(first)
        assert reader.page(first.number).complete


def test_each_segment_tells_where_its_values_are_and_whose(folder):
    with open_pair(folder, segments=8) as (writer, _):
        told = []

        def done(values_at: int, number: int) -> None:
            count = writer.value_position + 1
            told.append(
                (number, [low for low, _, _ in layout.VALUE.iter_unpack(writer.memory[values_at:][: count * 24])])
            )

        writer.on_segment_end = done
        first = writer.begin_page(0, 0, 0)
        call(writer, 1)
        second = writer.begin_page(1, 0, 0)
        call(writer, 2)
        writer.end_page(first)  # it rests already: its segment has been told
        writer.resume_page(first)
        call(writer, 3)
        writer.end_page(first)
        writer.resume_page(second)
        for name in range(layout.FRAMES_PER_SEGMENT + 1):
            call(writer, name)
        writer.pause_page()
    many = list(range(layout.FRAMES_PER_SEGMENT + 1))  # a value comes before the frame that finds no room
    assert told == [(0, [1]), (1, [2]), (0, [3]), (1, many), (1, [])]


OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 2)),
    st.tuples(st.just("resume"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("pause"), st.just(0)),
    st.tuples(st.just("values"), st.integers(1, 300)),
    st.tuples(st.just("frames"), st.integers(1, 140)),
    st.tuples(st.just("rows"), st.integers(0, 400)),
)


class Diary:
    """Does what it is told with a writer, and remembers which segment of the run each thing went to."""

    def __init__(self, writer: RecorderWriter, reader: RecorderReader) -> None:
        self.writer, self.reader = writer, reader
        self.pages, self.frames, self.values, self.owners = [], [], [], []
        self.count = 0

    def do(self, verb: str, number: int) -> None:
        writer = self.writer
        if verb == "begin":
            self.pages.append(writer.begin_page(root=number, batch=len(self.pages), step=len(self.pages) // 2))
            self.frames.append([])
            self.values.append([])
        elif verb == "pause":
            writer.pause_page()
        elif verb in ("resume", "end") and self.pages:
            page = self.pages[-1 - number % len(self.pages)]
            (writer.resume_page if verb == "resume" else writer.end_page)(page)
        elif writer.page is not None:
            for _ in range(number if verb != "rows" else 1):
                self._write(verb, number)
        self._note_owner()

    def _write(self, verb: str, number: int) -> None:
        page, self.count = self.writer.page, self.count + 1
        name = self.count
        if verb == "values":
            index = self.writer.value(name, page.number, name)
            self._note_owner()
            self.values[page.number].append((len(self.owners) - 1, index, (name, page.number, name)))
            return
        kept = [(name, page.number, slot, 1, 0, 0) for slot in range(number if verb == "rows" else 1)]
        index = self.writer.frame(name, page.number, 0, 1, name, kept, 3)
        self._note_owner()
        kept = kept[: layout.ROWS_PER_SEGMENT]
        self.frames[page.number].append((len(self.owners) - 1, (index, name, page.number, 0, 1, name, kept, 3)))

    def _note_owner(self) -> None:
        """At most one segment is taken at a time, by the page that is being written."""
        while len(self.owners) <= self.reader[HeadField.SEGMENT]:
            self.owners.append(self.writer.page.number)

    def expected(self, page, segments: int):
        """Whether the page is complete, the indexes of its segments, its frames and its values."""
        oldest = max(0, len(self.owners) - segments)
        mine = [number for number, owner in enumerate(self.owners) if owner == page.number]
        return (
            page.ended and self.writer.page is not page,
            [index for index, number in enumerate(mine) if number >= oldest],
            [frame for number, frame in self.frames[page.number] if number >= oldest],
            {index: value for number, index, value in self.values[page.number] if number >= oldest},
        )


@given(operations=st.lists(OPERATIONS, max_size=40), segments=st.integers(1, 6))
def test_whatever_is_written_each_page_is_the_newest_that_the_ring_has_room_for(folder, operations, segments):
    """Any order of beginning, going on, resting and ending: never a mix, never a gap, never more lost than must be."""
    with open_pair(folder, segments=segments) as (writer, reader):
        diary = Diary(writer, reader)
        for verb, number in operations:
            diary.do(verb, number)
        held = {page.number: page for page in reader.held()}
        for page in diary.pages:
            complete, indexes, frames, values = diary.expected(page, segments)
            message = reader.page(page.number)
            assert (message is not None) == (page.number in held) == bool(indexes)
            if message is None:
                continue
            assert (message.root, message.batch, message.step) == (page.root, page.batch, page.step)
            assert (message.number, message.complete) == (page.number, complete)
            assert [segment.index for segment in message.segments] == indexes
            assert tables(message) == (frames, values)
            written = (len(diary.frames[page.number]), len(diary.values[page.number]))
            assert [index for index, *_ in frames] == list(range(written[0] - len(frames), written[0]))
            assert list(values) == list(range(written[1] - len(values), written[1]))
            assert held[page.number] == HeldPage(page.number, page.root, page.batch, complete, *written)
            if page is writer.page:
                assert (writer.frame_count, writer.cursor[0] > 0) == (written[0], True)
        writer.pause_page()
        assert (writer.frame_count, writer.cursor[0]) == (0, -1)
        for page in diary.pages:
            assert (page.frames, page.values) == (len(diary.frames[page.number]), len(diary.values[page.number]))


# -- the log ------------------------------------------------------------------------------------------------------

HERE = RunPosition(3, 2)
ENTRIES = [
    RootDef(0, "Net"),
    ModuleDef(1, 0, "fc", "Linear"),
    SlotDef(0, 1, "weight"),
    ShapeDef(0, (2, 3)),
    ScriptExit(HERE, 0),
    OwnFault(HERE, "hook", "é" * 33),
]


def test_the_log_is_read_once_and_in_order(folder):
    with open_pair(folder, segments=1) as (writer, reader):
        for entry in ENTRIES:
            assert writer.append(entry)
        definitions, events = reader.new_entries()
        assert [*definitions, *events] == ENTRIES
        assert reader.new_entries() == ([], [])
        writer.append(ENTRIES[0])
        assert reader.new_entries() == ([ENTRIES[0]], [])


def test_a_full_log_is_counted_and_an_event_still_finds_room(folder):
    with open_pair(folder, log_bytes=1 << 20, segments=1) as (writer, reader):
        name = "n" * 1000
        kept = 0
        while writer.append(ModuleDef(kept, 0, name, "Linear"), name=True):
            kept += 1
        assert not writer.append(ModuleDef(kept, 0, name, "Linear"), name=True)
        assert writer.append(OwnFault(HERE, "hook", "m" * 10_000))
        definitions, events = reader.new_entries()
        assert len(definitions) == kept
        assert len(events) == 1
        assert reader.state().records_lost == 2
        assert reader.state().names_lost == 2
        assert reader.state().events_lost == 0


def test_events_beyond_the_end_of_the_log_are_counted_too(folder):
    with open_pair(folder, log_bytes=4096, segments=1) as (writer, reader):
        results = [writer.append(OwnFault(HERE, "hook", "m" * 500)) for _ in range(20)]
        assert len(reader.new_entries()[1]) == sum(results)
        assert 0 < sum(results) < 20
        assert reader.state().records_lost == reader.state().events_lost == 20 - sum(results)


def test_a_fault_is_counted_in_the_header_however_full_the_log_is(folder):
    with open_pair(folder, log_bytes=1024, segments=1) as (writer, reader):
        for _ in range(20):
            writer.append(OwnFault(HERE, "hook", "m" * 500))
            writer.append(OwnFault(HERE, "stacks", "of a part that costs no frame"))
        assert reader.state().faults == 20


def damage(writer: RecorderWriter, offset: int, data: bytes) -> None:
    with writer.path.open("r+b") as file:
        file.seek(layout.HEADER_BYTES + offset)
        file.write(data)


def test_a_torn_log_entry_is_counted_and_the_next_is_read(folder):
    with open_pair(folder, segments=1) as (writer, reader):
        writer.append(ENTRIES[0])
        damage(writer, layout.ENTRY.size + 2, b"\xff\xff")
        writer.append(ENTRIES[1])
        assert reader.new_entries() == ([ENTRIES[1]], [])
        assert reader.damaged == 1
        assert reader.state().records_lost == 1


def test_a_torn_length_is_counted_and_not_fatal(folder):
    with open_pair(folder, segments=1) as (writer, reader):
        writer.append(ENTRIES[0])
        damage(writer, 0, struct.pack("<I", 0xFFFF_FFF0))
        assert reader.new_entries() == ([], [])
        assert reader.damaged == 1


def test_an_entry_of_a_later_version_is_counted_and_not_fatal(folder):
    with open_pair(folder, segments=1) as (writer, reader):

        class LaterEvent(OwnFault, tag="later"):
            pass

        writer.append(LaterEvent(HERE, "x", "y"))
        writer.append(ENTRIES[1])
        assert reader.new_entries() == ([ENTRIES[1]], [])
        assert reader.damaged == 1


@pytest.mark.parametrize("text", ["a file named \udcff", "\ud800"])
def test_text_that_is_no_utf8_does_not_raise_into_the_training(folder, text):
    """An exception about a file with an undecodable name carries such text."""
    with open_pair(folder, segments=1) as (writer, reader):
        writer.append(ScriptError(HERE, "OSError", text, text))
        _, events = reader.new_entries()
        assert len(events) == 1 or reader.state().records_lost == 1


def test_an_exit_code_beyond_64_bits_does_not_raise_into_the_training(folder):
    with open_pair(folder, segments=1) as (writer, reader):
        writer.append(ScriptExit(HERE, 1 << 70))
        _, events = reader.new_entries()
        assert len(events) == 1 or reader.state().records_lost == 1


# -- the file -----------------------------------------------------------------------------------------------------


def test_the_header_says_who_writes(folder):
    with open_pair(folder, segments=1) as (writer, reader):
        assert (reader.rank, reader.local_rank, reader.attempt, reader.pid) == (3, 1, 2, os.getpid())
        assert (reader.state().phase, reader.state().module) == ("starting", None)
        writer.append(ModuleDef(7, 0, "layer.1", "Linear"))
        reader.new_entries()
        writer.fields[HeadField.MODULE] = 7
        writer.fields[HeadField.PHASE] = RankPhase.FORWARD
        writer.fields[HeadField.SEQ] = 41
        writer.fields[HeadField.STEP] = 6
        writer.begin_page(0, 12, 6)
        state = reader.state()
        assert (state.phase, state.step, state.batch, state.seq) == ("forward", 6, 12, 41)
        assert (state.module, state.cls) == ("layer.1", "Linear")
        assert state.age_s >= 0


def test_the_magic_reads_as_its_comment_says():
    assert layout.MAGIC.to_bytes(8, "little") == b"GUWATCH1"


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b"\0" * layout.HEADER_BYTES, b"\xff" * layout.file_bytes(4096, 1)]
)
def test_a_file_that_is_no_recorder_is_not_ready(tmp_path, content):
    path = tmp_path / "x.recorder"
    path.write_bytes(content)
    with pytest.raises(NotReady):
        RecorderReader(path)


def test_a_recorder_is_never_written_over(tmp_path):
    path = tmp_path / "x.recorder"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0)
    assert path.read_bytes() == b"mine"


def test_no_space_raises_and_leaves_no_file(tmp_path, monkeypatch):
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        RecorderWriter(tmp_path / "x", rank=0, local_rank=0, world_size=1, attempt=0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_room_raises_instead_of_killing_the_training(tmp_path):
    """The real thing: a limit on the size of files stands in for a full /dev/shm."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from gpuwatch.core.recorder.writer import RecorderWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    RecorderWriter(Path(sys.argv[1]), rank=0, local_rank=0, world_size=1, attempt=0)\n"
        "except OSError as error:\n    print('refused', error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("refused"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_does_no_harm(tmp_path):
    writer = RecorderWriter(tmp_path / "x", rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=4096, segments=1)
    reader = RecorderReader(writer.path)
    for side in (writer, writer, reader, reader):
        side.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.events.definitions import ModuleDef
writer = RecorderWriter(Path(sys.argv[1]), rank=5, local_rank=0, world_size=8, attempt=0)
writer.append(ModuleDef(0, 0, "fc", "Linear"))
writer.begin_page(0, 8, 4)
for index in range(300):
    writer.frame(0, 0xFFFFFFFF, 0, 0, 17, [(0, writer.value(index, index + 1, 0x200), 0, 1, 0, 0)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_rows_of_a_process_that_was_killed_are_all_there(tmp_path):
    path = tmp_path / layout.file_name(5, 0)
    done = subprocess.run([sys.executable, "-c", KILLED, path], timeout=600)
    assert done.returncode == -signal.SIGKILL
    reader = RecorderReader(path)
    try:
        assert reader.new_entries() == ([ModuleDef(0, 0, "fc", "Linear")], [])
        page = last_page(reader)
        frames, values = tables(page)
        assert (page.batch, page.step, page.complete) == (8, 4, False)
        assert [values[row[1]] for *_, (row,), _ in frames] == [(index, index + 1, 0x200) for index in range(300)]
    finally:
        reader.close()


def test_reading_while_another_process_writes_never_shows_a_torn_row(tmp_path):
    """Frame, row and value of a call hold the same number; the ring wraps all the time."""
    path = tmp_path / "x.recorder"
    code = (
        "import sys; from pathlib import Path\n"
        "from gpuwatch.core.recorder.writer import RecorderWriter\n"
        "w = RecorderWriter(Path(sys.argv[1]), rank=0, local_rank=0, world_size=1, attempt=0, segments=4)\n"
        "print('ready', flush=True)\n"
        "n = 0\n"
        "for page in range(2500):\n"
        "    p = w.begin_page(0, page, 0)\n"
        "    for _ in range(40):\n"
        "        w.frame(n, 0, 0, 0, n, [(n, w.value(n, n, n), n, 1, 0, 0)]); n += 1\n"
        "    w.end_page(p)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        reader = RecorderReader(path)
        seen = 0
        while process.poll() is None:
            page = last_page(reader)
            if page is None:
                continue
            frames, values = tables(page)
            for _, module, *_, seq, (row,), _ in frames:
                assert module == seq == row[0]
                assert values.get(row[1], (module,) * 3) == (module,) * 3
                seen += 1
        reader.close()
    finally:
        process.stdout.close()
        process.wait(300)
    assert process.returncode == 0
    assert seen > 0


def test_reading_while_another_process_goes_back_and_forth_between_pages_never_mixes_them(tmp_path):
    """Every frame, row and value says which page it is of and the how-manieth in it; the ring wraps all the time."""
    path = tmp_path / "x.recorder"
    code = (
        "import sys; from pathlib import Path\n"
        "from gpuwatch.core.recorder.writer import RecorderWriter\n"
        "w = RecorderWriter(Path(sys.argv[1]), rank=0, local_rank=0, world_size=1, attempt=0, segments=6)\n"
        "print('ready', flush=True)\n"
        "def write(p, count):\n"
        "    w.resume_page(p)\n"
        "    for _ in range(count):\n"
        "        n, i = p.number, w.frame_count\n"
        "        w.frame(n, 0, 0, 0, i, [(n, w.value(n, i, 0), i, 1, 0, 0)])\n"
        "last = None\n"
        "for batch in range(1500):\n"
        "    model, loss = w.begin_page(0, batch, 0), w.begin_page(1, batch, 0)\n"
        "    for page, count in ((model, 30), (loss, 2), (last or model, 9), (loss, 1), (model, 30)):\n"
        "        write(page, count)\n"
        "    w.end_page(loss)\n"
        "    w.end_page(model)\n"
        "    last = model\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        reader = RecorderReader(path)
        seen = several = 0
        while process.poll() is None:
            for held in reader.held():
                assert (held.root, held.batch) == (held.number % 2, held.number // 2)
                page = reader.page(held.number)
                if page is None:
                    continue
                assert (page.root, page.batch) == (held.root, held.batch)
                frames, values = tables(page)
                indexes = [index for index, *_ in frames]
                assert indexes == sorted(set(indexes))
                for index, number, *_, seq, (row,), _ in frames:
                    assert (number, seq, row[0], row[2]) == (page.number, index, page.number, index)
                    assert row[1] == index
                    assert values.get(index, (page.number, index, 0)) == (page.number, index, 0)
                seen += len(frames)
                several += len(page.segments) > 1
        reader.close()
    finally:
        process.stdout.close()
        process.wait(300)
    assert process.returncode == 0
    assert seen > 0
    assert several > 0
