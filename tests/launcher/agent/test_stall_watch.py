"""The watch over a rank that does not move, with a real recorder and a clock that jumps."""

from __future__ import annotations

import os

import pytest
from gpuwatch.core.recorder.layout import HeadField, RankPhase, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.launcher.agent.rank_stalls import StallWatch
from gpuwatch.launcher.agent.rank_watch import RankWatch
from gpuwatch.worker.record import progress as step_clock


class Rank:
    """One rank that trains and then rests, and its agent's watch. `now` is the only clock, in seconds."""

    def __init__(self, folder, monkeypatch, timeout_s):
        self.now = 0.0
        monkeypatch.setattr(step_clock, "_now", lambda: int(self.now * 1e9))
        path = folder / file_name(0, 0)
        self.writer = RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=0)
        self.writer.fields[HeadField.PHASE] = RankPhase.SCRIPT
        self.clock = step_clock.StepClock(self.writer)
        self.watch = RankWatch(folder, 0, 0, os.getpid(), [])
        self.stalls = StallWatch(folder, timeout_s)
        self.told = []

    def passes(self, seconds):
        """The agent looks each second."""
        for _ in range(seconds):
            self.now += 1
            self.watch.poll(self.now)
            self.told += [(round(self.now), event.limit_s) for event in self.stalls.stalled([self.watch], self.now)]

    def step(self, number, seconds):
        self.writer.end_page(self.writer.begin_page(0, number, number))
        self.clock.forward_begins()
        self.passes(seconds)
        for part in ("forward_ends", "backward_ends", "reduction_ends", "optimizer_begins"):
            getattr(self.clock, part)()
        self.clock.step_ends(number)

    def close(self):
        self.watch.close()
        self.writer.close()


@pytest.fixture
def make_rank(tmp_path, monkeypatch):
    made = []

    def make(timeout_s):
        made.append(Rank(tmp_path, monkeypatch, timeout_s))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


@pytest.mark.parametrize("batches", [0, 2], ids=["before the first batch", "later"])
def test_a_rank_is_looked_at_before_its_groups_timeout(make_rank, batches):
    """Once: with its own limits it would be after 300 s, and before the first batch after 1200 s."""
    rank = make_rank(None)
    for number in range(batches):
        rank.step(number, 2)
    rank.writer.fields[HeadField.GROUP_TIMEOUT_MS] = 200_000
    rank.passes(270)

    ((_, limit_s),) = rank.told
    assert limit_s == 160.0


def test_a_timeout_that_is_longer_than_the_limit_changes_nothing(make_rank):
    rank = make_rank(100.0)
    for number in range(2):
        rank.step(number, 2)
    rank.writer.fields[HeadField.GROUP_TIMEOUT_MS] = 150_000
    rank.passes(180)

    assert [limit_s for _, limit_s in rank.told] == [100.0]


@pytest.mark.parametrize(
    ("timeout_s", "steps", "limit_s"),
    [
        (None, [2, 2], 300.0),
        (None, [2, 2, 2], 60.0),
        (None, [20, 9, 9, 9], 200.0),
        (100.0, [2, 2, 2, 2], 100.0),
    ],
)
def test_the_limit_is_learned_unless_the_user_says_it(make_rank, timeout_s, steps, limit_s):
    rank = make_rank(timeout_s)
    for number, seconds in enumerate(steps):
        rank.step(number, seconds)
    rank.passes(700)

    (first, limit), (second, _), *_ = rank.told
    assert (limit, second - first) == (limit_s, limit_s)


def test_before_the_first_batch_it_is_four_times_what_holds_without_steps(make_rank):
    rank = make_rank(None)
    rank.passes(1300)

    assert rank.told == [(1202, 1200.0)]


def test_nobody_is_told_of_if_the_user_says_so(make_rank):
    rank = make_rank(0.0)
    rank.step(0, 2)
    rank.passes(2000)

    assert rank.told == []
