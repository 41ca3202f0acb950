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
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.layout import Field, RankPhase
from gpuwatch.core.recorder.reader import NotReady, RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.records import Fault, ModuleDef, RootDef, ScriptError, ScriptExit, ShapeDef, SlotDef, Where
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


def tables(page):
    """A page as plain lists: frames with their rows, and values by index."""
    values, frames = {}, []
    for segment in page.segments:
        for offset, numbers in enumerate(layout.VALUE.iter_unpack(segment.values)):
            values[segment.value_base + offset] = numbers
        rows = list(layout.ROW.iter_unpack(segment.rows))
        for module, parent, depth, phase, _, seq, first, count, index in layout.FRAME.iter_unpack(segment.frames):
            frames.append((index, module, parent, depth, phase, seq, [row[:5] for row in rows[first : first + count]]))
    return frames, values


# -- one page -----------------------------------------------------------------------------------------------------

ROW = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
    st.integers(0, 5),
)
FRAME = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 32767),
    st.integers(0, 5),
    st.integers(-1, 2**62),
    st.lists(ROW, max_size=6),
)
VALUE = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3)


@given(st.lists(st.one_of(FRAME, VALUE), max_size=60))
@settings(max_examples=60)
def test_a_page_is_read_as_it_was_written(folder, calls):
    frames, values = [], {}
    with open_pair(folder, segments=8) as (writer, reader):
        number = writer.begin_page(root=4, batch=9, step=7)
        for call in calls:
            if len(call) == 3:
                values[writer.value(*call)] = call
            else:
                frames.append((writer.frame(*call), *call))
        writer.end_page()
        page = reader.page(number)
    assert (page.rank, page.attempt, page.number, page.root, page.batch, page.step) == (3, 2, number, 4, 9, 7)
    assert page.complete
    assert tables(page) == (frames, values)


@given(frames=st.integers(1, 500), rows=st.integers(0, 40), values=st.integers(0, 3))
@settings(max_examples=25)
def test_a_page_that_is_bigger_than_a_segment_keeps_every_frame(folder, frames, rows, values):
    with open_pair(folder, segments=128) as (writer, reader):
        number = writer.begin_page(0, 0, 0)
        written = []
        for module in range(frames):
            indexes = [writer.value(module, value, 0) for value in range(values)]
            table = [(slot, indexes[-1] if indexes else layout.NOTHING, 0, 1, 0) for slot in range(rows)]
            written.append((writer.frame(module, layout.NOTHING, 0, 0, -1, table), module, table))
        writer.end_page()
        got, numbers = tables(reader.page(number))
    assert [(index, module, table) for index, module, *_, table in got] == written
    assert len(numbers) == frames * values
    for index, module, *_, table in got:
        assert all(numbers[row[1]][0] == module for row in table if values), index


def test_a_page_that_is_open_is_read_as_far_as_it_got(folder):
    with open_pair(folder, segments=4) as (writer, reader):
        writer.begin_page(0, 5, 0)
        assert tables(reader.last_page()) == ([], {})
        writer.frame(1, layout.NOTHING, 0, 0, 3, [(0, writer.value(1, 2, 3), 0, 1, 0)])
        page = reader.last_page()
        assert not page.complete
        assert tables(page) == ([(0, 1, layout.NOTHING, 0, 0, 3, [(0, 0, 0, 1, 0)])], {0: (1, 2, 3)})
        writer.end_page()
        assert reader.last_page().complete


def test_a_new_page_ends_the_one_that_was_open(folder):
    with open_pair(folder, segments=4) as (writer, reader):
        first = writer.begin_page(0, 0, 0)
        second = writer.begin_page(0, 1, 0)
        assert (reader.page(first).complete, reader.page(second).complete) == (True, False)


def test_rows_that_no_segment_can_hold_are_counted(folder):
    with open_pair(folder, segments=4) as (writer, reader):
        writer.begin_page(0, 0, 0)
        writer.frame(1, layout.NOTHING, 0, 0, 0, [(slot, 0, 0, 0, 0) for slot in range(layout.ROWS_PER_SEGMENT + 7)])
        (frame,), _ = tables(reader.last_page())
        assert len(frame[-1]) == layout.ROWS_PER_SEGMENT
        assert reader.state().rows_lost == 7


# -- the ring -----------------------------------------------------------------------------------------------------


def test_the_ring_keeps_the_newest_pages(folder):
    with open_pair(folder, segments=3) as (writer, reader):
        for batch in range(10):
            writer.begin_page(0, batch, batch)
            writer.frame(batch, layout.NOTHING, 0, 0, 0, [])
            writer.end_page()
        assert [reader.page(number) is not None for number in range(10)] == [False] * 7 + [True] * 3
        assert tables(reader.last_page())[0][0][1] == 9


def test_of_a_page_bigger_than_the_ring_the_end_is_left_with_its_true_indexes(folder):
    with open_pair(folder, segments=2) as (writer, reader):
        writer.begin_page(0, 0, 0)
        total = 4 * layout.FRAMES_PER_SEGMENT
        for module in range(total):
            writer.frame(module, layout.NOTHING, 0, 0, 0, [(0, writer.value(module, 0, 0), 0, 0, 0)])
        writer.end_page()
        frames, values = tables(reader.last_page())
    assert [frame[0] for frame in frames] == list(range(frames[0][0], total))
    assert frames[0][0] > 0
    assert all(values[row[1]][0] == module for _, module, *_, (row,) in frames if row[1] in values)


def test_a_page_is_found_by_its_root_and_batch(folder):
    with open_pair(folder, segments=8) as (writer, reader):
        for root, cls, ordinal in ((0, "Net", 0), (1, "Net", 1)):
            writer.append(RootDef(root, cls, ordinal))
        reader.new_entries()
        numbers = {}
        for batch in range(3):
            for root in range(2):
                numbers[root, batch] = writer.begin_page(root, batch, 0)
        assert reader.find_page("Net", 1, 2).number == numbers[1, 2]
        assert reader.find_page("Net", 0, 1).number == numbers[0, 1]
        assert reader.find_page("Net", 0, 9) is None
        assert reader.find_page("Other", 0, 0) is None


# -- the log ------------------------------------------------------------------------------------------------------

HERE = Where(3, 2)
ENTRIES = [
    RootDef(0, "Net"),
    ModuleDef(1, 0, "fc", "Linear"),
    SlotDef(0, 1, "weight"),
    ShapeDef(0, (2, 3)),
    ScriptExit(HERE, 0),
    Fault(HERE, "hook", "é" * 33),
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
        assert writer.append(Fault(HERE, "hook", "m" * 10_000))
        definitions, events = reader.new_entries()
        assert len(definitions) == kept
        assert len(events) == 1
        assert reader.state().records_lost == 2


def test_events_beyond_the_end_of_the_log_are_counted_too(folder):
    with open_pair(folder, log_bytes=4096, segments=1) as (writer, reader):
        results = [writer.append(Fault(HERE, "hook", "m" * 500)) for _ in range(20)]
        assert len(reader.new_entries()[1]) == sum(results)
        assert 0 < sum(results) < 20
        assert reader.state().records_lost == 20 - sum(results)


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

        class LaterEvent(Fault, tag="later"):
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
        assert (reader.phase, reader.module()) == (RankPhase.STARTING, None)
        writer.append(ModuleDef(7, 0, "layer.1", "Linear"))
        reader.new_entries()
        writer.fields[Field.MODULE] = 7
        writer.fields[Field.PHASE] = RankPhase.FORWARD
        writer.fields[Field.SEQ] = 41
        writer.begin_page(0, 12, 6)
        state = reader.state()
        assert (state.phase, state.step, state.batch, state.seq) == ("forward", 6, 12, 41)
        assert (state.module, state.cls) == ("layer.1", "Linear")
        assert 0 <= state.age_s < 5


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
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, timeout=20)
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
from gpuwatch.core.records import ModuleDef
writer = RecorderWriter(Path(sys.argv[1]), rank=5, local_rank=0, world_size=8, attempt=0)
writer.append(ModuleDef(0, 0, "fc", "Linear"))
writer.begin_page(0, 8, 4)
for index in range(300):
    writer.frame(0, 0xFFFFFFFF, 0, 0, 17, [(0, writer.value(index, index + 1, 0x200), 0, 1, 0)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_rows_of_a_process_that_was_killed_are_all_there(tmp_path):
    path = tmp_path / layout.file_name(5, 0)
    done = subprocess.run([sys.executable, "-c", KILLED, path], timeout=20)
    assert done.returncode == -signal.SIGKILL
    reader = RecorderReader(path)
    try:
        assert reader.new_entries() == ([ModuleDef(0, 0, "fc", "Linear")], [])
        page = reader.last_page()
        frames, values = tables(page)
        assert (page.batch, page.step, page.complete) == (8, 4, False)
        assert [values[row[1]] for *_, (row,) in frames] == [(index, index + 1, 0x200) for index in range(300)]
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
        "    w.begin_page(0, page, 0)\n"
        "    for _ in range(40):\n"
        "        w.frame(n, 0, 0, 0, n, [(n, w.value(n, n, n), n, 1, 0)]); n += 1\n"
        "    w.end_page()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        reader = RecorderReader(path)
        seen = 0
        while process.poll() is None:
            page = reader.last_page()
            if page is None:
                continue
            frames, values = tables(page)
            for _, module, *_, seq, (row,) in frames:
                assert module == seq == row[0]
                assert values.get(row[1], (module,) * 3) == (module,) * 3
                seen += 1
        reader.close()
    finally:
        process.stdout.close()
        process.wait(20)
    assert process.returncode == 0
    assert seen > 0
