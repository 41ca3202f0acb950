"""RankWatch reads a recorder that a real writer writes."""

from __future__ import annotations

import pytest
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import ModuleDef, RootDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.recorder.layout import FRAME, NOTHING, VALUE, HeadField, RankPhase, file_name
from gpuwatch.core.recorder.writer import OpenPage, RecorderWriter
from gpuwatch.core.values import PENDING, ValueEncoding
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import EventMessage, NameDefinitions, PageMessage, WantedBatch
from gpuwatch.launcher.agent.rank_pages import LAST_PAGES, PAGE_SENDS, PAGE_WAIT_S
from gpuwatch.launcher.agent.rank_watch import RankWatch

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
        made.append(RankWatch(tmp_path, RANK, ATTEMPT, PID, list(traced)))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def anomaly(batch: int, root: str = "Net", page: int = 0) -> Anomaly:
    where = RunPosition(RANK, ATTEMPT, batch, batch, root, page)
    return Anomaly(where, 0, "fc", "Linear", "forward", "output", "nan", "float32")


def batch(writer: RecorderWriter, number: int, *, root: int = 0, frames: int = 1, ended: bool = True) -> OpenPage:
    page = writer.begin_page(root, number, number)
    write(writer, page, frames)
    if ended:
        writer.end_page(page)
    return page


def write(writer: RecorderWriter, page: OpenPage, frames: int = 1) -> None:
    """Write on in a page: its backward."""
    writer.resume_page(page)
    for index in range(frames):
        writer.frame(index, NOTHING, 0, 0, 0, [])


def pages(messages) -> list[tuple[int, int, bool]]:
    return [(m.root, m.batch, m.complete) for m in messages if isinstance(m, PageMessage)]


def frames(messages) -> list[int]:
    """How many frames each page has that is sent."""
    return [
        sum(len(segment.frames) // FRAME.size for segment in message.segments)
        for message in messages
        if isinstance(message, PageMessage)
    ]


def test_before_there_is_a_recorder_there_is_nothing(make_watch):
    watch = make_watch()
    assert watch.poll(0) == []
    assert watch.state() is None


def test_a_rank_that_never_made_its_recorder_ended_while_starting(make_watch):
    (message,) = make_watch().end(-9, "itself", 0)
    assert message == EventMessage(WorkerExit(RunPosition(RANK, ATTEMPT), -9, "itself", "starting"))


@pytest.mark.parametrize(("code", "told"), [(3, [3]), (-15, [])])
def test_a_signal_of_its_launcher_is_not_what_a_script_ended_with(writer, make_watch, code, told):
    """Its own Python was at its end, and could not tell the code."""
    watch = make_watch()
    watch.poll(0)
    writer.fields[HeadField.PHASE] = RankPhase.FINISHED
    events = [body.event for body in watch.end(code, "torchrun", 1) if isinstance(body, EventMessage)]
    assert [event.code for event in events if isinstance(event, ScriptExit)] == told


def test_definitions_come_before_events_and_each_once(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    writer.append(ScriptExit(RunPosition(RANK, ATTEMPT), 0))
    writer.append(ModuleDef(0, 0, "", "Net"))
    definitions, event = watch.poll(0)
    assert definitions == NameDefinitions(RANK, ATTEMPT, [RootDef(0, "Net"), ModuleDef(0, 0, "", "Net")])
    assert event == EventMessage(ScriptExit(RunPosition(RANK, ATTEMPT), 0))
    assert watch.poll(0) == []


def test_the_page_of_an_anomaly_is_sent_when_it_is_complete(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    page = batch(writer, 3, ended=False)
    writer.append(anomaly(3))
    assert pages(watch.poll(0)) == []
    writer.end_page(page)
    assert pages(watch.poll(0.1)) == [(0, 3, True)]
    assert pages(watch.poll(0.2)) == []


def test_a_page_that_does_not_end_is_sent_after_a_while_and_again_when_it_has_grown(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    page = batch(writer, 3, ended=False)
    writer.append(anomaly(3))
    watch.poll(0)
    assert pages(watch.poll(PAGE_WAIT_S)) == [(0, 3, False)]
    writer.frame(9, NOTHING, 0, 0, 0, [])
    writer.end_page(page)
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
        watch.want(WantedBatch(ATTEMPT, "Net", 0, 1), 0)
        watch.want(WantedBatch(ATTEMPT + 1, "Net", 0, 2), 0)
    assert pages(watch.poll(0)) == [(0, 1, True)]
    assert pages(watch.poll(0)) == []


def test_a_batch_that_is_still_to_come_is_waited_for(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    batch(writer, 0)
    watch.want(WantedBatch(ATTEMPT, "Net", 0, 1), 0)
    assert pages(watch.poll(0)) == []
    batch(writer, 1)
    assert pages(watch.poll(1)) == [(0, 1, True)]


def test_a_batch_that_was_overwritten_is_given_up(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    for number in range(20):
        batch(writer, number)
    watch.want(WantedBatch(ATTEMPT, "Net", 0, 1), 0)
    assert pages(watch.poll(PAGE_WAIT_S + 1)) == []
    assert not watch._pages._wanted


def test_traced_batches_are_sent_whole_and_once(writer, make_watch):
    watch = make_watch(traced=[0, 2])
    writer.append(RootDef(0, "Net"))
    sent = []
    for number in range(4):
        page = batch(writer, number, ended=False)
        sent += pages(watch.poll(0))
        writer.end_page(page)
        sent += pages(watch.poll(0))
    assert sent == [(0, 0, True), (0, 2, True)]


# -- pages that are written on in after the forward --------------------------------------------------------------

WATCHED = ["anomaly", "want", "trace"]


@pytest.fixture(params=WATCHED)
def watch_of_3(request, writer, make_watch):
    """A watch that is to send batch 3 of Net, for each of the three reasons there are."""
    watch = make_watch(traced=[3] if request.param == "trace" else [])
    writer.append(RootDef(0, "Net"))
    writer.append(RootDef(1, "Loss"))
    if request.param == "want":
        watch.want(WantedBatch(ATTEMPT, "Net", 0, 3), 0)
    elif request.param == "anomaly":
        writer.append(anomaly(3))
    return watch


def test_the_backward_is_in_the_page_that_is_sent(writer, watch_of_3):
    """The page stays open after the forward until the next batch of its root begins."""
    page = batch(writer, 3, frames=4, ended=False)
    assert pages(watch_of_3.poll(0)) == []
    batch(writer, 7, root=1)
    assert pages(watch_of_3.poll(1)) == [], "the loss comes in between: the backward is still to come"
    write(writer, page, 5)
    assert pages(watch_of_3.poll(2)) == []
    writer.end_page(page)
    batch(writer, 4, ended=False)
    sent = watch_of_3.poll(3)
    assert (pages(sent), frames(sent)) == ([(0, 3, True)], [9])
    assert pages(watch_of_3.poll(4)) == []
    batch(writer, 5)
    assert pages(watch_of_3.poll(1000)) == []


def test_a_page_whose_backward_comes_after_the_next_forward_is_sent_again(writer, watch_of_3):
    """In a pipeline the micro-batches go forward one after the other, and back later."""
    third = batch(writer, 3, frames=2)
    fourth = batch(writer, 4, frames=2, ended=False)
    assert frames(watch_of_3.poll(0)) == [2]
    write(writer, third, 3)
    assert frames(watch_of_3.poll(1)) == [], "it is being written: it is sent when it rests"
    write(writer, fourth)
    sent = watch_of_3.poll(2)
    assert (pages(sent), frames(sent)) == ([(0, 3, True)], [5])
    assert pages(watch_of_3.poll(3)) == []


def test_a_page_that_goes_on_and_on_is_not_sent_endlessly_and_once_more_at_the_end(writer, watch_of_3):
    third = batch(writer, 3)
    sent = []
    for now in range(6 * PAGE_SENDS):
        sent += frames(watch_of_3.poll(now))
        if now % 6 == 0:  # a pause between its pieces: the ring of this test has 8 segments
            write(writer, third)
            writer.pause_page()
    pieces = third.frames
    assert pieces == 1 + PAGE_SENDS
    assert sent == list(range(1, PAGE_SENDS + 1))
    batch(writer, 7, root=1)
    ended = watch_of_3.end(0, "itself", 1000)
    assert sorted(zip(pages(ended), frames(ended), strict=True)) == [((0, 3, True), pieces), ((1, 7, True), 1)]
    assert pages(watch_of_3.poll(2000)) == []


def test_a_page_that_is_open_when_the_rank_ends_is_sent_as_far_as_it_got(writer, watch_of_3):
    """A loss module was called last, so that the page of interest is not the last one that was written."""
    batch(writer, 3, frames=4, ended=False)
    batch(writer, 7, root=1)
    assert pages(watch_of_3.poll(0)) == []
    ended = watch_of_3.end(-9, "itself", 1)
    assert sorted(pages(ended)) == [(0, 3, False), (1, 7, True)]
    assert pages(watch_of_3.poll(2)) == []


def test_what_the_ring_overwrites_does_not_count_as_change(writer, watch_of_3):
    third = batch(writer, 3)
    for _ in range(3):  # 4 segments in all
        write(writer, third)
        writer.pause_page()
    assert frames(watch_of_3.poll(0)) == [4]
    for number in range(4, 10):
        batch(writer, number)
        assert pages(watch_of_3.poll(number)) == []


def test_a_page_sent_unfinished_is_sent_again_when_it_is_complete_and_not_before(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    page = batch(writer, 3, frames=4, ended=False)
    watch.want(WantedBatch(ATTEMPT, "Net", 0, 3), 0)
    assert pages(watch.poll(PAGE_WAIT_S)) == [(0, 3, False)]
    for now in range(10, 20):
        write(writer, page)
        assert pages(watch.poll(now)) == []
    writer.end_page(page)
    sent = watch.poll(20)
    assert (pages(sent), frames(sent)) == ([(0, 3, True)], [14])


def test_a_page_that_was_complete_and_is_being_written_again_is_not_torn_up_by_its_deadline(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    page = batch(writer, 3)
    watch.want(WantedBatch(ATTEMPT, "Net", 0, 3), 0)
    assert pages(watch.poll(0)) == [(0, 3, True)]
    write(writer, page)
    assert pages(watch.poll(PAGE_WAIT_S + 1)) == []
    writer.pause_page()
    assert frames(watch.poll(PAGE_WAIT_S + 2)) == [2]


def test_a_wanted_batch_is_forgotten_when_the_ring_has_overwritten_it(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    for number in range(100):
        watch.want(WantedBatch(ATTEMPT, "Net", 0, number), 0)
        batch(writer, number)
        assert pages(watch.poll(0)) == [(0, number, True)]
    assert len(watch._pages._wanted) <= 8
    assert len(watch._pages._sent) <= 8


def test_several_pages_of_one_batch_are_all_sent(writer, watch_of_3):
    """A part of the model that is called by itself has a page of its own in the current batch."""
    batch(writer, 3, frames=4)
    batch(writer, 3, frames=1)
    assert frames(watch_of_3.poll(0)) == [4, 1]


# -- values that are still on their device -----------------------------------------------------------------------


def arrive(writer: RecorderWriter) -> None:
    """The copy off the device has landed."""
    position = writer.memory.find(VALUE.pack(0, 0, PENDING))
    assert position > 0
    VALUE.pack_into(writer.memory, position, 1, 2, ValueEncoding.FLOAT16 << 8)


def test_a_page_whose_values_are_on_their_way_is_sent_when_they_have_arrived(writer, watch_of_3):
    page = batch(writer, 3, ended=False)
    writer.value(0, 0, PENDING)
    writer.end_page(page)
    assert pages(watch_of_3.poll(0)) == []
    arrive(writer)
    assert pages(watch_of_3.poll(1)) == [(0, 3, True)]
    assert pages(watch_of_3.poll(2)) == []


def test_values_that_come_after_the_wait_are_sent_too(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    writer.append(anomaly(3))
    page = batch(writer, 3, ended=False)
    writer.value(0, 0, PENDING)
    writer.end_page(page)
    watch.poll(0)
    assert pages(watch.poll(PAGE_WAIT_S)) == [(0, 3, True)]
    assert pages(watch.poll(PAGE_WAIT_S + 1)) == []
    arrive(writer)
    assert pages(watch.poll(PAGE_WAIT_S + 2)) == [(0, 3, True)]
    assert pages(watch.poll(PAGE_WAIT_S + 3)) == []


def test_values_that_do_not_arrive_do_not_send_their_page_again(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    writer.append(anomaly(3))
    page = batch(writer, 3, ended=False)
    writer.value(0, 0, PENDING)
    writer.end_page(page)
    watch.poll(0)
    assert pages(watch.poll(PAGE_WAIT_S)) == [(0, 3, True)]
    assert pages(watch.end(-6, "itself", PAGE_WAIT_S + 1)) == []


def test_values_that_never_arrive_do_not_keep_a_page_back_at_the_end(writer, watch_of_3):
    page = batch(writer, 3, ended=False)
    writer.value(0, 0, PENDING)
    writer.end_page(page)
    batch(writer, 7, root=1)
    watch_of_3.poll(0)
    assert sorted(pages(watch_of_3.end(-6, "itself", 1))) == [(0, 3, True), (1, 7, True)]


# -- the end -----------------------------------------------------------------------------------------------------


def test_of_many_open_pages_the_newest_are_sent_at_the_end(tmp_path, make_watch):
    """Nobody asked for one; each root's batch that was at work may hold what ended the rank."""
    writer = RecorderWriter(
        tmp_path / file_name(RANK, ATTEMPT), rank=RANK, local_rank=1, world_size=8, attempt=ATTEMPT, segments=32
    )
    try:
        watch = make_watch()
        first = batch(writer, 0, root=0)
        for root in range(1, 20):
            batch(writer, 0, root=root, ended=False)
        write(writer, first)
        writer.pause_page()
        sent = pages(watch.end(-9, "itself", 0))
    finally:
        writer.close()
    assert sent == [(0, 0, True), *((root, 0, False) for root in range(20 - LAST_PAGES, 20))]


def test_a_batch_wanted_after_the_rank_has_ended_is_still_sent(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    for number in range(4):
        batch(writer, number)
    assert pages(watch.end(0, "itself", 0)) == [(0, 3, True)]
    for number in (1, 3, 9):
        watch.want(WantedBatch(ATTEMPT, "Net", 0, number), 1)
    assert pages(watch.poll(1)) == [(0, 1, True)]
    assert not watch._pages._wanted
    assert pages(watch.poll(2)) == []


def test_the_end_says_where_the_rank_was_and_brings_its_last_page(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net", 1))
    writer.append(ModuleDef(7, 0, "layer.1", "Linear"))
    batch(writer, 6, ended=False)
    writer.fields[HeadField.STEP] = 6
    writer.fields[HeadField.PHASE] = RankPhase.FORWARD
    writer.fields[HeadField.MODULE] = 7
    writer.fields[HeadField.SEQ] = 33
    definitions, page, final, last = watch.end(-9, "itself", 0)
    assert isinstance(definitions, NameDefinitions)
    (state,) = final.ranks
    assert (state.final, state.world_size, state.batch, state.overflow) == (True, 8, 6, False)
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


def test_numbers_that_never_came_back_are_counted_at_the_end(writer, make_watch):
    watch = make_watch()
    page = writer.begin_page(0, 0, 0)
    for meta in (PENDING, ValueEncoding.FLOAT32 << 8, PENDING):
        writer.value(0, 0, meta)
    writer.end_page(page)
    batch(writer, 1)
    state = next(m for m in watch.end(0, "itself", 0) if isinstance(m, NodeBeat)).ranks[0]
    assert state.pending == 2


def test_an_anomaly_that_found_no_room_in_the_log_is_told_at_the_end(writer, make_watch):
    watch = make_watch()
    writer.note_first_anomaly(anomaly(3))
    told = [m.event for m in watch.end(1, "itself", 0) if isinstance(m, EventMessage)]
    assert told[0] == anomaly(3)


def test_an_anomaly_of_the_log_is_told_once(writer, make_watch):
    watch = make_watch()
    writer.append(anomaly(3))
    told = watch.poll(0) + watch.end(1, "itself", 0)
    assert [m.event for m in told if isinstance(m, EventMessage) and isinstance(m.event, Anomaly)] == [anomaly(3)]


def test_a_recorder_of_another_rank_is_not_believed(writer, make_watch):
    writer.identify(RANK + 1, 0, 1, ATTEMPT)
    watch = make_watch()
    (fault,) = watch.poll(0)
    assert f"to rank {RANK + 1}" in fault.event.message
    assert (fault.event.where.rank, watch.poll(1), watch.state()) == (RANK, [], None)
    (last,) = watch.end(0, "itself", 2)
    assert last.event == WorkerExit(RunPosition(RANK, ATTEMPT), 0, "itself", "starting")


def test_a_damaged_recorder_does_not_end_the_agent(writer, make_watch):
    watch = make_watch()
    writer.append(RootDef(0, "Net"))
    writer.fields[HeadField.PHASE] = 77
    watch.poll(0)
    assert watch.state() is not None
