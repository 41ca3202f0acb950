"""What ended last in a rank's last batch, by its recorder: a rank that is stopped cannot be asked."""

from __future__ import annotations

import pytest
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.frames import FramePhase, RowKind, RowMark
from gpuwatch.core.recorder.layout import NOTHING, HeadField, RankPhase, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import DTYPE_CODES, ValueEncoding
from gpuwatch.core.wire.messages import EventMessage
from gpuwatch.launcher.agent.rank_watch import RankWatch

FORWARD, LOSS, BACKWARD = FramePhase.FORWARD, FramePhase.LOSS, FramePhase.BACKWARD


class Rank:
    """Its recorder, which it writes as a rank does, and its agent."""

    def __init__(self, folder):
        self.writer = RecorderWriter(
            folder / file_name(0, 0), rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=1 << 16, segments=8
        )
        for entry in (RootDef(0, "Net"), ModuleDef(0, 0, "", "Net"), SlotDef(0, 0, "output")):
            self.writer.append(entry, name=True)
        self.watch = RankWatch(folder, 0, 0, 4242, [])
        self._step = 0

    def batch(self, number, *phases, mark=0):
        """A batch with one frame in each of these phases."""
        self.writer.begin_page(0, number, self._step)
        self.writer.fields[HeadField.BATCH] = number
        for phase in phases:
            value = self.writer.value(0, 0x3F800000, ValueEncoding.FLOAT32 << 8)
            row = (0, value, NOTHING, DTYPE_CODES["float32"], RowKind.MEASURED.number, mark)
            self.writer.frame(0, NOTHING, 0, phase.number, number, [row])
            self.enter(RankPhase.BACKWARD if phase is BACKWARD else RankPhase.SCRIPT)

    def step(self):
        self._step += 1
        self.writer.fields[HeadField.STEP] = self._step
        self.enter(RankPhase.SCRIPT)

    def train(self, number):
        self.batch(number, FORWARD, LOSS, BACKWARD)
        self.step()

    def enter(self, phase):
        self.writer.fields[HeadField.PHASE] = phase

    def ended_part(self, batch):
        self.watch.poll(0)
        return self.watch.ended_part(batch)


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.watch.close()
    made.writer.close()


def test_after_a_forward_no_backward_has_begun(rank):
    rank.train(0)
    rank.batch(1, FORWARD)
    assert rank.ended_part(1) == "forward"


def test_gradients_without_a_step_are_the_backward(rank):
    rank.train(0)
    rank.batch(1, FORWARD, LOSS, BACKWARD)
    assert rank.ended_part(1) == "backward"


def test_a_step_before_the_batch_has_a_backward_is_of_the_batch_before(rank):
    rank.train(0)
    rank.batch(1, FORWARD, LOSS, BACKWARD)
    rank.batch(2, FORWARD)  # a pipelined one
    rank.step()
    assert rank.ended_part(2) == ""


def test_a_step_since_the_batch_began_is_the_optimizers(rank):
    rank.train(0)
    rank.train(1)
    assert rank.ended_part(1) == "optimizer"


def test_the_first_batch_does_not_show_whether_backwards_are_recorded(rank):
    rank.batch(0, FORWARD)
    assert rank.ended_part(0) == ""


def test_without_any_recorded_backward_nothing_is_said_of_one(rank):
    for number in range(3):
        rank.batch(number, FORWARD)
    assert rank.ended_part(2) == ""


def test_a_batch_that_is_skipped_shows_no_backward(rank):
    rank.train(0)
    rank.batch(1, FORWARD, mark=RowMark.SKIPPED)
    assert rank.ended_part(1) == ""


def test_a_backward_that_has_begun_and_recorded_no_gradient_yet_has_not_ended(rank):
    rank.train(0)
    rank.batch(1, FORWARD, LOSS)
    assert rank.ended_part(1) == ""


def test_before_its_first_batch_nothing_has_ended(rank):
    rank.enter(RankPhase.SCRIPT)
    assert rank.ended_part(-1) == ""


def test_a_rank_that_has_gone_on_since_tells_nothing_of_the_batch_before(rank):
    rank.train(0)
    rank.batch(1, FORWARD)
    assert rank.ended_part(0) == ""


def test_the_end_of_the_process_tells_it(rank):
    rank.train(0)
    rank.batch(1, FORWARD)
    events = [body.event for body in rank.watch.end(-9, "itself", 1.0) if isinstance(body, EventMessage)]
    (exit_,) = [event for event in events if isinstance(event, WorkerExit)]
    assert (exit_.phase, exit_.after) == ("script", "forward")


def test_a_page_that_cannot_be_read_costs_this_alone(rank, monkeypatch):
    rank.train(0)
    rank.batch(1, FORWARD)
    monkeypatch.setattr("gpuwatch.launcher.agent.step_position.PageTables", lambda page: 1 / 0)
    events = [body.event for body in rank.watch.end(-9, "itself", 1.0) if isinstance(body, EventMessage)]
    assert [event.part for event in events if isinstance(event, OwnFault)] == ["step position"]
    assert [event.after for event in events if isinstance(event, WorkerExit)] == [""]
