"""The history of a rank, read from a recorder that a real writer writes."""

from __future__ import annotations

import itertools
import struct

import pytest
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.own_limits import OwnFault, costs_frames
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.frames import LOSS_CLASS, LOSS_MODULE, FramePhase, RowKind
from gpuwatch.core.recorder.layout import NOTHING, file_name
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import DTYPE_CODES, PENDING, NonFinite, ValueEncoding
from gpuwatch.core.wire.columns import unpack
from gpuwatch.core.wire.messages import EventMessage, PageMessage, PageSegment, RankHistoryMessage, WantedBatch
from gpuwatch.launcher.agent import batch_history as history
from gpuwatch.launcher.agent.batch_history import EVERY_BATCH, RankHistory, thinned
from gpuwatch.launcher.agent.outbox import MessageOutbox
from gpuwatch.launcher.agent.rank_watch import RankWatch

NAMES = [RootDef(0, "Net"), ModuleDef(0, 0, "fc", "Linear"), SlotDef(0, 0, "output")]


@pytest.fixture
def writer(tmp_path):
    recorder = RecorderWriter(
        tmp_path / file_name(0, 0), rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=1 << 16, segments=8
    )
    yield recorder
    recorder.close()


@pytest.fixture
def reader(writer):
    found = RecorderReader(writer.path)
    yield found
    found.close()


@pytest.fixture
def watch(tmp_path):
    found = RankWatch(tmp_path, 0, 0, 4242, [])
    yield found
    found.close()


def float32(number: float) -> tuple[int, int, int]:
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return 0, bits, ValueEncoding.FLOAT32 << 8


def batch(writer: RecorderWriter, number: int, value: tuple[int, int, int]) -> None:
    """`fc` returns a tensor whose abs max is `value`."""
    page = writer.begin_page(0, number, number)
    writer.resume_page(page)
    index = writer.value(*value)
    writer.frame(
        0, NOTHING, 0, FramePhase.FORWARD.number, 0, [(0, index, 0, DTYPE_CODES["float32"], RowKind.MEASURED.number, 0)]
    )
    writer.end_page(page)


LOSS = [ModuleDef(1, 0, LOSS_MODULE, LOSS_CLASS), SlotDef(1, 1, "output")]


def with_loss(writer: RecorderWriter, number: int, output: float, loss: float) -> None:
    """`fc` returns a tensor, and the batch has a loss behind it."""
    page = writer.begin_page(0, number, number)
    writer.resume_page(page)
    for place, phase, value in ((0, FramePhase.FORWARD, output), (1, FramePhase.LOSS, loss)):
        row = (place, writer.value(*float32(value)), 0, DTYPE_CODES["float32"], RowKind.MEASURED.number, 0)
        writer.frame(place, NOTHING, 0, phase.number, 0, [row])
    writer.end_page(page)


def all_of(rank_history: RankHistory) -> tuple[list[int], list[float]]:
    (found,) = rank_history.messages(0, 0)
    return found.batches, unpack(found)[:, 0].tolist()


def test_every_batch_that_is_over_is_looked_at_once(writer, reader):
    kept = RankHistory(clock=lambda: 0.0)
    kept.define(NAMES)
    for number in range(20):
        batch(writer, number, float32(number + 1))
        kept.read(reader, reader.header(), number)
        kept.read(reader, reader.header(), number)
    assert all_of(kept) == (list(range(19)), [float(number + 1) for number in range(19)])
    kept.finish(reader)
    assert all_of(kept)[0] == list(range(20)), "and the last one when the rank has ended"


def test_it_takes_a_bounded_share_of_a_processor(writer, reader):
    """Each look at a page takes 10 ms: at 1 %, the next is a second later."""
    used = iter(n * 0.01 for n in range(10_000))
    kept = RankHistory(clock=lambda: next(used))
    kept.define(NAMES)
    for number in range(400):
        batch(writer, number, float32(1.0))
        kept.read(reader, reader.header(), number * 0.05)
    assert len(all_of(kept)[0]) <= 20 * history._AT_A_TIME + 1


def test_numbers_that_are_late_are_waited_for(writer, reader):
    kept = RankHistory(clock=lambda: 0.0)
    kept.define(NAMES)
    batch(writer, 0, (0, 0, PENDING))
    batch(writer, 1, float32(1.0))
    kept.read(reader, reader.header(), 0.0)
    assert kept.messages(0, 0) == []
    segment = writer.segment_at(0)
    assert segment is not None
    place = bytes(writer.view).index(PENDING.to_bytes(8, "little"), segment) - 16
    writer.view[place : place + 24] = b"".join(part.to_bytes(8, "little") for part in float32(5.0))
    kept.read(reader, reader.header(), 0.5)
    assert all_of(kept) == ([0], [5.0])


def test_the_older_the_coarser():
    rows = list(range(1000))
    kept = thinned(rows, int, EVERY_BATCH)
    assert kept[-EVERY_BATCH:] == list(range(1000 - EVERY_BATCH, 1000))
    steps = [later - earlier for earlier, later in itertools.pairwise(kept)]
    assert steps == sorted(steps, reverse=True)
    assert thinned(kept, int, EVERY_BATCH) == kept, "it is thin already"


@pytest.mark.slow
def test_twenty_thousand_batches_stay_inside_the_bound(monkeypatch):
    """What is kept grows with the logarithm of the run's length; the message has a bound of its own."""
    kept = RankHistory(clock=lambda: 0.0)
    slots, most_bytes, most_sent = 20, 1 << 15, 1 << 10  # of the real bounds a share as of a real model's slots
    kept.define([*NAMES[:2], *(SlotDef(number, 0, f"output[{number}]") for number in range(slots))])
    monkeypatch.setattr(history, "BYTES", most_bytes)
    monkeypatch.setattr(history, "SENT_BYTES", most_sent)
    message = page_of(slots)
    most = 0
    for number in range(20_000):
        kept._take(replaced(message, number), late=True)
        most = max(most, kept._bytes)
    assert most_bytes / 2 < most <= most_bytes
    (found,) = kept.messages(0, 0)
    assert found.batches[-1] == 19_999
    assert 0 < unpack(found).nbytes / 2 <= most_sent


def page_of(slots: int) -> PageMessage:
    """A page with a row for each slot."""
    rows = b"".join(struct.pack("<IIIBBH", n, 0, 0, 1, RowKind.MEASURED.number, 0) for n in range(slots))
    frame = struct.pack("<IIhBBqIII", 0, NOTHING, 0, FramePhase.FORWARD.number, 0, 0, 0, slots, 0)
    return PageMessage(0, 0, 0, 0, 0, 0, True, [PageSegment(0, 0, 0, frame, rows, struct.pack("<qqq", *float32(1.0)))])


def replaced(message: PageMessage, number: int) -> PageMessage:
    return PageMessage(0, 0, number, 0, number, number, True, message.segments)


def run(writer, watch, last: tuple[int, int, int]) -> None:
    for entry in NAMES:
        writer.append(entry)
    for number in range(4):
        batch(writer, number, last if number == 3 else float32(number + 1))
        watch.poll(float(number))


def test_a_rank_that_ended_badly_tells_its_history_before_its_end(writer, watch):
    run(writer, watch, (0, 0, NonFinite.POSINF | ValueEncoding.FLOAT32 << 8))
    messages = watch.end(1, "itself", 9.0)
    (found,) = [message for message in messages if isinstance(message, RankHistoryMessage)]
    assert unpack(found)[:, 0].tolist() == [1.0, 2.0, 3.0, float("inf")]
    assert messages.index(found) < len(messages) - 1


def test_a_rank_that_ended_well_tells_it_only_if_it_was_asked(writer, watch, tmp_path):
    run(writer, watch, float32(4.0))
    assert not [message for message in watch.end(0, "itself", 9.0) if isinstance(message, RankHistoryMessage)]
    again = RankWatch(tmp_path, 0, 0, 4242, [])
    again.poll(0.0)
    again.want(WantedBatch(0, "Net", 0, 3), 1.0)
    assert [message for message in again.end(0, "itself", 9.0) if isinstance(message, RankHistoryMessage)]
    again.close()


def test_a_history_that_cannot_be_read_costs_nothing_else(writer, watch, monkeypatch):
    monkeypatch.setattr(RankHistory, "read", lambda *given: 1 / 0)
    monkeypatch.setattr(RankHistory, "finish", lambda *given: 1 / 0)
    run(writer, watch, float32(4.0))
    assert [m for m in watch.end(1, "itself", 9.0) if isinstance(m, PageMessage)]


def test_it_displaces_no_page_and_is_counted_where_there_is_no_room():
    outbox = MessageOutbox(page_bytes=10_000)
    page = PageMessage(0, 0, 0, 0, 0, 0, True, [PageSegment(0, 0, 0, b"x" * 4000, b"", b"")])
    outbox.put(page)
    outbox.put(RankHistoryMessage(0, 0, 0, [], [], [], b"", b"x" * 4000))
    outbox.put(page)
    assert outbox.pages_dropped == {0: 1}, "the history"
    assert sum(b"history" in data for _, data in outbox.due()) == 0


def fail(*given, **more):
    raise RuntimeError("no such thing")


def poll_until_told(watch, writer, batches: int) -> list[OwnFault]:
    """Faults of all polls while so many batches are written."""
    found = []
    for number in range(batches):
        batch(writer, number, float32(number + 1.0))
        watch.hottest()
        found += [body.event for body in watch.poll(float(number)) if isinstance(body, EventMessage)]
    return [event for event in found if isinstance(event, OwnFault)]


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ("forecasts", "gpuwatch.launcher.agent.forecast.RootForecasts.update"),
        ("hottest modules", "gpuwatch.launcher.agent.batch_history.closest"),
        ("history", "gpuwatch.launcher.agent.batch_history.RankHistory.read"),
        ("step times", "gpuwatch.launcher.agent.batch_history.RankStepTimes.read"),
    ],
)
def test_an_error_of_ours_is_told_once_and_costs_nothing_else(writer, watch, monkeypatch, part, place):
    for entry in NAMES:
        writer.append(entry, name=True)
    monkeypatch.setattr(watch._history, "_share", 1e9)  # it looks at every batch
    monkeypatch.setattr(place, fail)
    (fault,) = poll_until_told(watch, writer, 12)
    assert (fault.part, fault.message, fault.where.rank) == (part, "RuntimeError: no such thing", 0)
    assert not costs_frames(fault.part)
    watch.want(WantedBatch(0, "Net", 0, 3), 20.0)
    histories = [body for body in watch.end(1, "itself", 30.0) if isinstance(body, RankHistoryMessage)]
    assert len(histories) == 1, "the rest goes on"


def test_a_history_that_cannot_be_sent_is_told_when_the_rank_ends(writer, watch, monkeypatch):
    for entry in NAMES:
        writer.append(entry, name=True)
    batch(writer, 0, float32(1.0))
    watch.poll(0.0)
    monkeypatch.setattr("gpuwatch.launcher.agent.batch_history.RankHistory.messages", fail)
    bodies = [body.event for body in watch.end(1, "itself", 30.0) if isinstance(body, EventMessage)]
    assert [event.part for event in bodies if isinstance(event, OwnFault)] == ["history"]


def test_the_loss_of_each_batch_is_in_it_and_is_no_module_near_a_limit(writer, reader):
    kept = RankHistory(clock=lambda: 0.0)
    kept.define([*NAMES, *LOSS])
    assert kept.loss == -1.0
    for number in range(40):
        with_loss(writer, number, 1.0, 2.0 ** (3 * number))
        kept.read(reader, reader.header(), number)
    kept.finish(reader)
    assert kept.loss == 2.0 ** (3 * 39)
    (found,) = kept.messages(0, 0)
    assert found.slots == [0, 1]
    assert unpack(found)[:, 1].tolist() == [2.0 ** (3 * number) for number in range(40)]
    assert kept.told(0, 0) == []
    assert [hot.module for hot in kept.hottest(0, 4)] == ["fc"]


def test_the_pages_before_a_growth_are_sent_with_the_history_of_a_rank_that_overflowed(writer, watch):
    """Its weights may have been changed there."""
    for entry in NAMES:
        writer.append(entry, name=True)
    for number, size in enumerate([1.0, 1.1, 0.9, 1.0, 1.0, 40.0, 900.0, float("inf")]):
        batch(writer, number, float32(size))
        if number == 2:
            watch.poll(0.0)
    writer.append(Anomaly(RunPosition(0, 0, 7, 7, "Net", 7), 0, "fc", "Linear", "forward", "output", "+inf", "float32"))
    sent = [body.batch for body in watch.end(4, "itself", 1.0) if isinstance(body, PageMessage)]
    assert sorted(sent) == [3, 4, 5, 6, 7]


def test_outputs_that_do_not_run_away_bring_no_more_pages(writer, watch):
    for entry in NAMES:
        writer.append(entry, name=True)
    for number in range(8):
        batch(writer, number, float32(1.0 + number))
    writer.append(Anomaly(RunPosition(0, 0, 7, 7, "Net", 7), 0, "fc", "Linear", "forward", "output", "+inf", "float32"))
    assert [body.batch for body in watch.end(4, "itself", 1.0) if isinstance(body, PageMessage)] == [7]
