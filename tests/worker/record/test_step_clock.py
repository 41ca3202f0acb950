"""Which part of a step the time goes to, with a clock that jumps."""

from __future__ import annotations

import pytest
from gpuwatch.core.recorder.layout import STEPS, HeadField
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.worker.record import progress as step_clock


class Run:
    """A StepClock, the time that it sees, and the recorder."""

    def __init__(self, path, monkeypatch):
        self.now = 0
        monkeypatch.setattr(step_clock, "_now", lambda: self.now)
        self.writer = RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0)
        self.reader = RecorderReader(path)
        self.clock = step_clock.StepClock(self.writer)

    def after(self, ns, mark, *args, waited=0):
        self.now += ns
        self.writer.fields[HeadField.WAITED_NS] += waited
        getattr(self.clock, mark)(*args)

    def step(self, number, *, outside=5):
        self.after(outside, "forward_begins")
        self.after(10, "forward_ends")
        self.after(20, "backward_ends")
        self.after(40, "reduction_ends")
        self.after(1, "optimizer_begins")
        self.after(2, "step_ends", number)

    def seen(self, after=0):
        return [(count, step.number, step.parts) for count, step in self.reader.steps(after)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = Run(tmp_path / "recorder", monkeypatch)
    yield run
    run.reader.close()
    run.writer.close()


def test_each_part_has_its_time(run):
    run.step(1)

    assert run.seen() == [(1, 1, (5, 10, 20, 40, 3))]


def test_waiting_in_a_call_is_in_no_other_part(run):
    run.after(5, "forward_begins")
    run.after(10, "forward_ends", waited=4)
    run.after(20, "backward_ends")
    run.after(0, "reduction_ends")
    run.after(50, "optimizer_begins", waited=49)
    run.after(2, "step_ends", 1)

    assert run.seen() == [(1, 1, (5, 6, 20, 53, 3))]


def test_several_forwards_in_one_step_are_added_up(run):
    run.after(5, "forward_begins")
    run.after(10, "forward_ends")
    run.after(7, "forward_begins")
    run.after(10, "forward_ends")
    run.after(20, "backward_ends")
    run.after(1, "reduction_ends")
    run.after(0, "optimizer_begins")
    run.after(2, "step_ends", 1)

    assert run.seen() == [(1, 1, (12, 20, 20, 1, 2))]


@pytest.mark.parametrize("missing", ["forward_begins", "reduction_ends"])
def test_a_step_that_was_not_seen_whole_is_not_shown(run, missing):
    """A batch that is skipped has no hook in its backward: how long it waited there is not known."""
    for mark in ("forward_begins", "forward_ends", "backward_ends", "reduction_ends", "optimizer_begins"):
        if mark != missing:
            run.after(1, mark)
    run.after(1, "step_ends", 1)
    run.step(2)

    assert [number for _, number, _ in run.seen()] == [2]


def test_the_ring_holds_the_last_ones_and_a_reader_takes_each_once(run):
    for number in range(1, STEPS + 11):
        run.step(number)

    assert [count for count, _, _ in run.seen()] == list(range(11, STEPS + 11))
    assert [count for count, _, _ in run.seen(STEPS + 8)] == [STEPS + 9, STEPS + 10]
    assert run.seen(STEPS + 10) == []
