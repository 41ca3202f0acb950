"""RankWatch reads a recorder that a real writer writes."""

from __future__ import annotations

import pytest
from gpuwatch.core.messages import Definitions, EventMessage, PageMessage, Want
from gpuwatch.core.recorder.layout import NOTHING, Field, RankPhase, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.records import Anomaly, ModuleDef, RootDef, ScriptExit, Where, WorkerExit
from gpuwatch.launcher.ranks import PAGE_WAIT_S, RankWatch

RANK, ATTEMPT, PID = 5, 1, 4242


@pytest.fixture
def writer(tmp_path):
    recorder = RecorderWriter(
        tmp_path / file_name(RANK, ATTEMPT),
        rank=RANK,
        local_rank=1,
        world_size=8,
        attempt=ATTEMPT,
        log_bytes=1 << 16,
        segments=8,
    )
    yield recorder
    recorder.close()


@pytest.fixture
def make_watch(tmp_path):
    made = []

    def make(traced=()) -> RankWatch:
        made.append(RankWatch(tmp_path, RANK, 1, ATTEMPT, PID, list(traced)))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def anomaly(batch: int, root: str = "Net", page: int = 0) -> Anomaly:
    where = Where(RANK, ATTEMPT, batch, batch, root, page)
    return Anomaly(where, 0, "fc", "Linear", "forward", "output", "nan", "float32")


def batch(writer: RecorderWriter, number: int, *, root: int = 0, frames: int = 1, ended: bool = True) -> None:
    writer.begin_page(root, number, number)
    for index in range(frames):
        writer.frame(index, NOTHING, 0, 0, 0, [])
    if ended:
        writer.end_page()


def pages(messages) -> list[tuple[int, int, bool]]:
    return [(m.root, m.batch, m.complete) for m in messages if isinstance(m, PageMessage)]


def test_before_there_is_a_recorder_there_is_nothing(make_watch):
    watch = make_watch()
    assert watch.poll(0) == []
    assert watch.state() is None


def test_a_rank_that_never_made_its_recorder_ended_while_starting(make_watch):
    (message,) = make_watch().end(-9, "itself", 0)
    assert message == EventMessage(WorkerExit(Where(RANK, ATTEMPT), -9, "itself", "starting"))


def test_definitions_come_before_events_and_each_once(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    writer.append(ScriptExit(Where(RANK, ATTEMPT), 0))
    writer.append(ModuleDef(0, 0, "", "Net"))
    definitions, event = watch.poll(0)
    assert definitions == Definitions(RANK, ATTEMPT, [RootDef(0, "Net"), ModuleDef(0, 0, "", "Net")])
    assert event == EventMessage(ScriptExit(Where(RANK, ATTEMPT), 0))
    assert watch.poll(0) == []


def test_the_page_of_an_anomaly_is_sent_when_it_is_complete(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    batch(writer, 3, ended=False)
    writer.append(anomaly(3))
    assert pages(watch.poll(0)) == []
    writer.end_page()
    assert pages(watch.poll(0.1)) == [(0, 3, True)]
    assert pages(watch.poll(0.2)) == []


def test_a_page_that_does_not_end_is_sent_after_a_while_and_again_when_it_has_grown(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    batch(writer, 3, ended=False)
    writer.append(anomaly(3))
    watch.poll(0)
    assert pages(watch.poll(PAGE_WAIT_S)) == [(0, 3, False)]
    writer.frame(9, NOTHING, 0, 0, 0, [])
    writer.end_page()
    assert pages(watch.end(1, "itself", PAGE_WAIT_S + 1)) == [(0, 3, True)]


def test_the_page_that_is_sent_is_that_of_the_anomalys_own_root(writer, make_watch):
    """The next root has begun before anybody looked: a generator, then its discriminator."""
    watch = make_watch()
    writer.append(RootDef(0, "Generator"))
    writer.append(RootDef(1, "Critic"))
    batch(writer, 3, root=0)
    writer.append(anomaly(3, "Generator"))
    batch(writer, 3, root=1)
    assert pages(watch.poll(0)) == [(0, 3, True)]


def test_the_page_of_the_second_root_of_a_class_is_found(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    writer.append(RootDef(1, "Net", 1))
    batch(writer, 3, root=1)
    writer.append(anomaly(3, "Net#2"))
    batch(writer, 4, root=0)
    assert pages(watch.poll(0)) == [(1, 3, True)]


def test_a_batch_that_the_collector_wants_is_sent_once(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    for number in range(3):
        batch(writer, number)
    watch.poll(0)
    for _ in range(2):
        watch.want(Want(ATTEMPT, "Net", 0, 1), 0)
        watch.want(Want(ATTEMPT + 1, "Net", 0, 2), 0)
    assert pages(watch.poll(0)) == [(0, 1, True)]
    assert pages(watch.poll(0)) == []


def test_a_batch_that_is_still_to_come_is_waited_for(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    batch(writer, 0)
    watch.want(Want(ATTEMPT, "Net", 0, 1), 0)
    assert pages(watch.poll(0)) == []
    batch(writer, 1)
    assert pages(watch.poll(1)) == [(0, 1, True)]


def test_a_batch_that_was_overwritten_is_given_up(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    for number in range(20):
        batch(writer, number)
    watch.want(Want(ATTEMPT, "Net", 0, 1), 0)
    assert pages(watch.poll(PAGE_WAIT_S + 1)) == []
    assert not watch._wanted


def test_traced_batches_are_sent_whole_and_once(writer, make_watch):
    watch = make_watch(traced=[0, 2])
    writer.append(RootDef(0, "Net"))
    sent = []
    for number in range(4):
        batch(writer, number, ended=False)
        sent += pages(watch.poll(0))
        writer.end_page()
        sent += pages(watch.poll(0))
    assert sent == [(0, 0, True), (0, 2, True)]


def test_the_end_says_where_the_rank_was_and_brings_its_last_page(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net", 1))
    writer.append(ModuleDef(7, 0, "layer.1", "Linear"))
    batch(writer, 6, ended=False)
    writer.fields[Field.PHASE] = RankPhase.FORWARD
    writer.fields[Field.MODULE] = 7
    writer.fields[Field.SEQ] = 33
    definitions, page, last = watch.end(-9, "itself", 0)
    assert isinstance(definitions, Definitions)
    assert pages([page]) == [(0, 6, False)]
    exit_ = last.event
    assert (exit_.code, exit_.by, exit_.phase, exit_.module, exit_.cls) == (
        -9,
        "itself",
        "forward",
        "layer.1",
        "Linear",
    )
    assert (exit_.where.step, exit_.where.batch, exit_.where.page, exit_.where.seq) == (6, 6, 0, 33)
    assert exit_.where.root == "Net#2", "as every other event names its root"
    assert watch.ended


def test_a_damaged_recorder_does_not_end_the_agent(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    writer.fields[Field.PHASE] = 77
    watch.poll(0)
    assert watch.state() is not None
