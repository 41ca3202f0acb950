"""A slow rank while the job runs: beats of made numbers, and a clock that jumps."""

from __future__ import annotations

import pytest
from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.so_far import LEAST_S, LiveStragglers
from gpuwatch.core.recorder.layout import PARTS
from gpuwatch.core.wire.beat import NodeBeat, RankState
from gpuwatch.core.wire.messages import WatchSlowRank

STEPS = 20
"""In each stretch."""
USUAL_US = 100_000


class Job:
    """Ranks in lockstep: all wait for the slowest."""

    def __init__(self, world: int) -> None:
        self.said: list[str] = []
        self.now = 0.0
        self.world = world
        self.live = LiveStragglers(FactFold(), self.said.append, lambda: self.now)
        self.restart(0)

    def restart(self, attempt: int) -> None:
        self.attempt = attempt
        self.timed = [0] * self.world
        self.parts = [[0] * len(PARTS) for _ in range(self.world)]
        self.beat()

    def beat(self) -> None:
        for rank in range(self.world):
            state = RankState(
                *(rank, 0, self.attempt, 1, "forward", self.timed[rank], self.timed[rank], 0),
                world_size=self.world,
                steps_timed=self.timed[rank],
                parts_us=list(self.parts[rank]),
            )
            self.live.on_message(NodeBeat([state], {}))
        self.live.tick()

    def runs(self, *slow: tuple[int, float], part: str = "forward", stretches: int = 3) -> list[str]:
        """What is said in some stretches, in which some ranks take so many times as long as the others."""
        before = len(self.said)
        for _ in range(stretches):
            self.now += LEAST_S
            own = [USUAL_US * dict(slow).get(rank, 1.0) for rank in range(self.world)]
            for rank in range(self.world):
                self.timed[rank] += STEPS
                self.parts[rank][PARTS.index("forward")] += USUAL_US * STEPS
                self.parts[rank][PARTS.index(part)] += int((own[rank] - USUAL_US) * STEPS)
                self.parts[rank][PARTS.index("waiting")] += int((max(own) - own[rank]) * STEPS)
            self.beat()
        return self.said[before:]


@pytest.mark.parametrize("world", [2, 3, 8, 256])
def test_it_is_told_once_with_what_it_costs(world):
    job = Job(world)
    job.runs()

    assert job.runs((1, 1.15), stretches=10) == [
        "Rank 1 costs the job 13% of its time now: the others wait for it. Most of the difference is in the forward. "
        "[GW221]"
    ]


def test_who_looks_on_sees_what_it_costs_now():
    job = Job(4)
    assert job.live.slow is None
    job.runs((2, 1.15), stretches=5)
    assert (job.live.slow.rank, round(job.live.slow.cost, 2)) == (2, 0.13)
    job.runs((2, 1.5), stretches=5)
    assert (job.live.slow.rank, round(job.live.slow.cost, 2)) == (2, 0.33)
    job.runs(stretches=5)
    assert job.live.slow is None
    job.runs((3, 1.5), stretches=5)
    job.restart(1)
    assert job.live.slow is None, "another attempt begins anew"


def test_its_node_is_asked_to_look_at_it_once_two_stretches_agree():
    job = Job(4)
    job.runs(stretches=4)
    assert job.live.watched == WatchSlowRank(0), "nobody is slow"
    job.runs((2, 1.5), part="outside", stretches=1)
    assert job.live.watched == WatchSlowRank(0)
    job.runs((2, 1.5), part="outside", stretches=1)
    assert job.live.watched == WatchSlowRank(0, 2)
    job.runs(stretches=3)
    assert job.live.watched == WatchSlowRank(0)
    job.runs((3, 1.5), stretches=3)
    assert job.live.watched == WatchSlowRank(0, 3)
    job.restart(1)
    assert job.live.watched == WatchSlowRank(1), "another attempt begins anew"


def test_a_large_share_is_told_loudly_and_again_only_when_it_has_become_large():
    job = Job(4)
    assert len(job.runs((2, 1.15), stretches=5)) == 1
    (text,) = job.runs((2, 1.5), part="outside", stretches=5)
    assert text.startswith("WARNING: Rank 2 costs the job 33% of its time now: the others wait for it. Most of")
    assert "data loading" in text
    assert job.runs((2, 1.15), stretches=5) == []


def test_it_is_told_when_it_has_changed():
    job = Job(4)
    job.runs((2, 1.5), stretches=4)
    assert [text[:15] for text in job.runs((3, 1.5), stretches=4)] == ["WARNING: Rank 3"]
    assert job.runs(stretches=4) == ["The others no longer wait for rank 3."]
    assert job.runs(stretches=4) == []


@pytest.mark.parametrize(
    "slow",
    [
        [],
        [(1, 1.05)],
        [(1, 1.5), (2, 1.4)],  # of two, neither is the one
    ],
)
def test_nothing_is_told_where_none_is_clearly_the_slow_one(slow):
    assert Job(4).runs(*slow, stretches=8) == []


def test_one_stretch_alone_is_not_told():
    job = Job(4)
    for rank in (0, 1, 2, 3, 0):
        assert job.runs((rank, 1.5), stretches=1) == []


def test_too_few_steps_are_not_compared():
    job = Job(2)
    for _ in range(3):
        job.runs((1, 1.5), stretches=1)
        job.timed = [timed - STEPS + 1 for timed in job.timed]
    assert job.said == []


def test_another_attempt_begins_anew():
    job = Job(2)
    assert len(job.runs((1, 1.5), stretches=4)) == 1
    job.restart(1)
    assert len(job.runs((1, 1.5), stretches=4)) == 1


def test_an_agent_that_was_started_again_counts_anew_and_nothing_is_compared_across_it():
    job = Job(2)
    job.runs(stretches=4)
    job.timed[0], job.parts[0] = STEPS, [USUAL_US] * len(PARTS)
    assert job.runs(stretches=4) == []


@pytest.mark.parametrize("parts", [[1 << 60] * 5, [-1] * 5, [0] * 50])
def test_numbers_that_no_agent_sends_are_not_compared(parts):
    job = Job(2)
    job.parts[1] = parts
    assert job.runs((1, 1.5), stretches=4) == []
