from __future__ import annotations

import contextlib
import sqlite3

import pytest
from gpuwatch.collector.finish import report_from_store
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.collector.store import RunStore
from gpuwatch.collector.store_tables import SCHEMA
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import (
    AgentMessage,
    EventMessage,
    NameDefinitions,
    NodeBye,
    PageMessage,
    PageSegment,
    encode,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ..waiting import until


@pytest.fixture
def store(tmp_path):
    made = RunStore(tmp_path / "run.sqlite", create=True)
    yield made
    made.close()


def message(n: int, signal: int = 0) -> AgentMessage:
    return AgentMessage(n, EventMessage(NodeSignal(signal or n)), n - 1)


def add(store: RunStore, agent: str, given: AgentMessage) -> None:
    store.add(agent, given, encode(given))


def test_messages_come_back_by_agent_and_number(store):
    for agent, n in (("b", 1), ("a", 2), ("a", 1), ("a", 10)):
        add(store, agent, message(n))
    assert list(store.messages()) == [
        (agent, n, message(n).body) for agent, n in (("a", 1), ("a", 2), ("a", 10), ("b", 1))
    ]


def test_a_duplicate_is_ignored(store):
    add(store, "a", message(1, 7))
    add(store, "a", message(1, 8))
    assert [body.event.signal for _, _, body in store.messages()] == [7]


def test_of_beats_the_last_one_is_kept_and_comes_last(store):
    for dropped in (1, 2):
        store.beat("a", encode(AgentMessage(0, NodeBeat([], {0: dropped}))))
    add(store, "a", message(1))
    assert [type(body) for _, _, body in store.messages()] == [EventMessage, NodeBeat]
    assert list(store.messages())[1][2].pages_dropped == {0: 2}


def test_a_store_is_read_again_by_another_process(store):
    store.set("started", "now")
    add(store, "a", message(1))
    store.commit()
    again = RunStore(store.path)
    assert list(again.messages()) == [("a", 1, message(1).body)]
    assert (again.get("started"), again.get("nothing"), again.get("schema")) == ("now", None, str(SCHEMA))
    again.close()


def test_what_was_not_committed_is_not_there_for_others(store):
    add(store, "a", message(1))
    again = RunStore(store.path)
    assert list(again.messages()) == []
    again.close()
    assert store.commit()


def test_a_store_of_a_later_version_is_refused_with_the_mend(store):
    store.set("schema", str(SCHEMA + 1))
    store.commit()
    with pytest.raises(GpuwatchError, match="later gpuwatch; read it with that one"):
        RunStore(store.path)


def test_a_file_that_is_no_store_is_told_in_a_sentence(tmp_path):
    text, other = tmp_path / "x.txt", tmp_path / "other.sqlite"
    text.write_text("not a database, but long enough to be taken for one" * 20)
    sqlite3.connect(other).close()
    for path in (text, other):
        path.touch()
        with pytest.raises(GpuwatchError, match="expected a run store, found something else"):
            RunStore(path)
    with pytest.raises(GpuwatchError, match="found no file"):
        RunStore(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_message_that_cannot_be_read_is_left_out(store):
    store.add("a", message(1), b"\xff garbage")
    add(store, "a", message(2))
    assert [n for _, n, _ in store.messages()] == [2]


def fill(store: RunStore, many: int = 400) -> list[int]:
    """Add messages of 5 kB, each in a commit of its own. Returns the numbers of those that were said to be durable."""
    durable: list[int] = []
    waiting: list[int] = []
    for n in range(1, many + 1):
        add(store, "a", AgentMessage(n, NodeBye("x" * 5000)))
        waiting.append(n)
        if store.commit():
            durable += waiting
            waiting = []
    return durable


def readable(path) -> list[int]:
    again = RunStore(path)
    try:
        return [n for _, n, _ in again.messages()]
    finally:
        again.close()


def test_on_a_full_disk_only_what_can_be_read_again_is_called_durable(small_disk):
    said: list[str] = []
    store = RunStore(small_disk / "run.sqlite", create=True, say=said.append)
    durable = fill(store)
    assert 0 < len(durable) < 400
    assert store.unwritten == 400 - len(durable)
    assert readable(store.path) == durable
    assert [n for _, n, _ in store.messages()] == list(range(1, 401)), "what could not be written is kept in memory"
    assert len(said) == 1
    assert "cannot be written" in said[0]
    store.close()


def test_a_store_on_a_full_disk_goes_on_in_the_other_folder(small_disk, tmp_path):
    said: list[str] = []
    store = RunStore(small_disk / "run.sqlite", create=True, fallback=tmp_path / "other", say=said.append)
    store.set("started", "now")
    assert fill(store) == list(range(1, 401))
    assert (store.unwritten, store.path) == (0, tmp_path / "other" / "run.sqlite")
    assert sorted(readable(small_disk / "run.sqlite") + readable(store.path)) == list(range(1, 401))
    assert [n for _, n, _ in store.messages()] == list(range(1, 401))
    assert f"it continues in {tmp_path / 'other'}" in said[0]
    assert ((tmp_path / "other").stat().st_mode & 0o777, RunStore(store.path).get("started")) == (0o700, "now")
    store.close()


@pytest.mark.slow
def test_a_disk_that_has_room_again_is_written_again(small_disk):
    ballast = small_disk / "ballast"
    store = RunStore(small_disk / "run.sqlite", create=True)
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    assert len(fill(store, 10)) < 10
    ballast.unlink()
    until(store.commit, "the store takes what it holds", lambda: f"{store.unwritten} are unwritten")
    assert store.unwritten == 0
    assert readable(store.path) == list(range(1, 11))
    store.close()


def test_pages_that_no_disk_takes_are_dropped_before_memory_is_full_and_events_are_not(store, monkeypatch):
    monkeypatch.setattr("gpuwatch.collector.store.MEMORY_BYTES", 20_000)
    add(store, "a", message(1))
    for n in range(2, 12):
        segment = PageSegment(0, 0, 0, b"", b"", b"x" * 4000)
        add(store, "a", AgentMessage(n, PageMessage(0, 0, n, 0, 0, 0, True, [segment])))
    numbers = [n for _, n, _ in store.messages()]
    assert (numbers[0], numbers[-1], len(numbers) + store.dropped) == (1, 11, 11)
    assert store.dropped


@pytest.mark.parametrize("n", [1 << 63, (1 << 64) - 1])
def test_a_number_beyond_sqlites_does_no_harm(store, n):
    """It passes the decoder: msgpack has unsigned integers of 64 bits."""
    add(store, "a", AgentMessage(n, NodeBye("ok")))
    assert [body for _, _, body in store.messages()] in ([], [NodeBye("ok")])


NET = [RootDef(0, "Net"), ShapeDef(0, (2, 3)), *(ModuleDef(n, 0, f"encoder.layers.{n}", "Linear") for n in range(500))]


def of_rank(rank: int, entries=NET, n: int = 1) -> AgentMessage:
    return AgentMessage(n, NameDefinitions(rank, 0, entries), n - 1)


def test_definitions_of_ranks_that_run_the_same_model_are_stored_once(tmp_path):
    sizes = []
    for ranks in (1, 64):
        made = RunStore(tmp_path / f"{ranks}.sqlite", create=True)
        for rank in range(ranks):
            add(made, f"a{rank}", of_rank(rank))
        made.close()
        sizes.append(made.path.stat().st_size)
        again = RunStore(made.path)
        assert [body for _, _, body in again.messages()] == [
            of_rank(rank).body for rank in sorted(range(ranks), key=lambda rank: f"a{rank}")
        ]
        again.close()
    assert sizes[1] - sizes[0] < 63 * 200, "a few numbers for each rank"


def test_definitions_are_read_before_they_are_written_and_by_the_collector_that_goes_on(store):
    add(store, "a", of_rank(0, NET[:10]))
    assert [body for _, _, body in store.messages()] == [of_rank(0, NET[:10]).body]
    store.commit()
    other = RunStore(store.path, create=True)
    add(other, "a", of_rank(0, NET[5:20], n=2))
    other.commit()
    assert [body.entries for _, _, body in other.messages()] == [NET[:10], NET[5:20]]
    other.close()


def test_a_store_of_schema_1_is_read(tmp_path):
    path = tmp_path / "run.sqlite"
    db = sqlite3.connect(path)
    db.executescript(
        "CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;"
        "INSERT INTO run VALUES ('schema', '1');"
        "CREATE TABLE message (agent TEXT NOT NULL, n INTEGER NOT NULL, received_ns INTEGER NOT NULL,"
        " kind TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (agent, n)) STRICT;"
        "CREATE TABLE beat (agent TEXT PRIMARY KEY, received_ns INTEGER NOT NULL, body BLOB NOT NULL) STRICT;"
    )
    row = ("a", 1, 0, "definitions", encode(of_rank(3)))
    db.execute("INSERT INTO message VALUES (?, ?, ?, ?, ?)", row)
    db.commit()
    db.close()
    old = RunStore(path)
    assert [body for _, _, body in old.messages()] == [of_rank(3).body]
    old.close()


def test_a_page_is_found_again_written_or_not(store):
    page = PageMessage(0, 0, 7, 0, 0, 0, True, [PageSegment(0, 0, 0, b"", b"", b"x")])
    add(store, "a", AgentMessage(5, page, 4))
    add(store, "a", message(6))
    for _ in range(2):
        assert store.page("a", 5) == page
        assert store.page("a", 6) is None
        assert store.page("b", 5) is None
        store.commit()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), max_size=30))
@settings(max_examples=20, deadline=None)
def test_any_order_with_duplicates_is_the_same_store(tmp_path_factory, arrivals):
    path = tmp_path_factory.mktemp("store") / "run.sqlite"
    made = RunStore(path, create=True)
    try:
        for agent, n in arrivals:
            add(made, agent, message(n))
        made.commit()
        assert [(agent, n) for agent, n, _ in made.messages()] == sorted(set(arrivals))
    finally:
        made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "run.sqlite"
    made = RunStore(path, create=True)
    made.set("started", "now")
    made.set("max_frames", "7")
    for n in range(1, 40):
        add(made, "a", AgentMessage(n, NodeBye("x" * 300)))
    made.beat("a", encode(AgentMessage(0, NodeBeat([], {}))))
    made.close()
    return path.read_bytes()


def test_what_sqlite_cites_of_a_damaged_file_is_on_one_line(whole, tmp_path):
    """Its message has the statement that it read there."""
    folder = tmp_path / "20261121-000000-aaaa"
    folder.mkdir()
    at = whole.index(b"INTEGER NOT NULL")
    RunPaths(folder).store.write_bytes(whole[:at] + b"\x1b[2J`" + whole[at + 5 :])
    with pytest.raises(GpuwatchError, match="expected a run store") as raised:
        report_from_store(RunPaths(folder))
    assert str(raised.value).isprintable()


@pytest.mark.slow
@given(st.data())
def test_any_damage_is_a_sentence_or_what_is_left(whole, tmp_path_factory, data):
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.binary(min_size=1, max_size=64))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(whole))))
    folder = tmp_path_factory.mktemp("damaged") / "20261121-000000-aaaa"
    folder.mkdir()
    paths = RunPaths(folder)
    paths.store.write_bytes((whole[:at] + new + whole[at + len(new) :])[:cut])
    try:
        report = report_from_store(paths)
    except GpuwatchError as error:
        assert "\n" not in str(error)
    else:
        assert len(to_json(report)) < 1 << 20


def before_checksums(store: RunStore) -> None:
    """Make the file what a version before schema 3 has written."""
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        for table in ("message", "definition", "beat"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN crc")
        db.execute("UPDATE run SET value = '2' WHERE key = 'schema'")


def test_a_store_without_checksums_is_read_and_goes_on(store):
    names = NameDefinitions(0, 0, [RootDef(0, "Net")])
    page = PageMessage(0, 0, 0, 0, 0, 0, True, [])
    for n, body in enumerate((names, page), 1):
        add(store, "a", AgentMessage(n, body, n - 1))
    store.beat("a", encode(AgentMessage(0, NodeBeat([], {0: 1}))))
    before_checksums(store)
    expected = [("a", 1, names), ("a", 2, page), ("a", 0, NodeBeat([], {0: 1}))]

    with contextlib.closing(RunStore(store.path)) as read:
        assert list(read.messages()) == expected
        assert read.page("a", 2) == page
    with contextlib.closing(RunStore(store.path, create=True)) as resumed:
        add(resumed, "a", message(3))
        assert resumed.commit()
        assert [n for _, n, _ in resumed.messages()] == [1, 2, 3, 0]
        assert resumed.get("schema") == str(SCHEMA)


@pytest.mark.parametrize("table", ["message", "definition", "beat"])
def test_a_row_that_the_disk_has_damaged_is_left_out(store, table):
    add(store, "a", AgentMessage(1, NameDefinitions(0, 0, [RootDef(0, "Net"), RootDef(1, "Met")]), 0))
    add(store, "a", AgentMessage(2, EventMessage(NodeSignal(15, reason="Net")), 1))
    store.beat("a", encode(AgentMessage(0, NodeBeat([], {}, hot=b"Net"))))
    store.close()
    whole = {(n, type(body)) for _, n, body in RunStore(store.path).messages()}
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        for key, body in db.execute(f"SELECT rowid, body FROM {table}").fetchall():
            db.execute(f"UPDATE {table} SET body = ? WHERE rowid = ?", (body.replace(b"Net", b"Bet"), key))

    left = list(RunStore(store.path).messages())

    lost = {"message": (2, EventMessage), "definition": (1, NameDefinitions), "beat": (0, NodeBeat)}[table]
    assert lost in whole and lost not in {(n, type(body)) for _, n, body in left}
    if table == "definition":  # what is left of it has no number: the message is not whole
        assert ("a", 0, NameDefinitions(0, 0, [RootDef(1, "Met")])) in left
