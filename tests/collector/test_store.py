from __future__ import annotations

import sqlite3

import pytest
from gpuwatch.collector.store import SCHEMA, RunStore
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.messages import AgentMessage, Beat, Bye, EventMessage, encode
from gpuwatch.core.records import NodeSignal
from hypothesis import given, settings
from hypothesis import strategies as st


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
        store.beat("a", encode(AgentMessage(0, Beat([], {0: dropped}))))
    add(store, "a", message(1))
    assert [type(body) for _, _, body in store.messages()] == [EventMessage, Beat]
    assert list(store.messages())[1][2].pages_dropped == {0: 2}


def test_a_store_is_read_again_by_another_process(store):
    store.set("started", "now")
    store.begin()
    add(store, "a", message(1))
    store.commit()
    again = RunStore(store.path)
    assert list(again.messages()) == [("a", 1, message(1).body)]
    assert (again.get("started"), again.get("nothing"), again.get("schema")) == ("now", None, str(SCHEMA))
    again.close()


def test_what_was_not_committed_is_not_there_for_others(store):
    store.begin()
    add(store, "a", message(1))
    again = RunStore(store.path)
    assert list(again.messages()) == []
    again.close()
    store.commit()


def test_a_store_of_a_later_version_is_refused_with_the_mend(store):
    store.set("schema", str(SCHEMA + 1))
    with pytest.raises(GpuwatchError, match="later gpuwatch; update with: pip install"):
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


def test_a_full_disk_keeps_the_message_in_memory_and_counts_it(store):
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = AgentMessage(1, Bye("x" * 200_000))
    add(store, "a", big)
    assert store.unwritten == 1
    assert list(store.messages()) == [("a", 1, big.body)]


@pytest.mark.parametrize("n", [1 << 63, (1 << 64) - 1])
def test_a_number_beyond_sqlites_does_no_harm(store, n):
    """It passes the decoder: msgpack has unsigned integers of 64 bits."""
    add(store, "a", AgentMessage(n, Bye("ok")))
    assert [body for _, _, body in store.messages()] in ([], [Bye("ok")])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), max_size=30))
@settings(max_examples=20, deadline=None)
def test_any_order_with_duplicates_is_the_same_store(tmp_path_factory, arrivals):
    path = tmp_path_factory.mktemp("store") / "run.sqlite"
    made = RunStore(path, create=True)
    try:
        made._db.execute("PRAGMA synchronous=OFF")
        made.begin()
        for agent, n in arrivals:
            add(made, agent, message(n))
        made.commit()
        assert [(agent, n) for agent, n, _ in made.messages()] == sorted(set(arrivals))
    finally:
        made.close()
