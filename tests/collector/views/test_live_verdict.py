"""The verdict so far, with clocks that jump."""

from __future__ import annotations

import pytest
from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.so_far import LiveVerdict


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.used = 0.0


class Live:
    """A fold, what was said of it, and a clock of which each decision takes 10 ms."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.clock = Clock()
        self.folded = FactFold()
        self._n = 0
        self.verdict = LiveVerdict(self.folded, self.said.append, lambda: self.clock.now, self._used, lambda: 0.25)

    def _used(self) -> float:
        self.clock.used += 0.01
        return self.clock.used

    def on_message(self, *bodies) -> None:
        for body in bodies:
            self._n += 1
            self.folded.add("a0", self._n, body)
            self.verdict.on_message(body)


@pytest.fixture
def live():
    return Live()


def overflow(make, rank, seq):
    batch = make.Batch(rank, seq=seq)
    given, weights = [batch.tensor()], {"weight": batch.tensor()}
    batch.call("fc", "Linear", given=given, returned=[batch.tensor(make.INF)], weights=weights)
    return batch


def test_it_is_said_as_soon_as_the_event_is_there_and_again_when_it_changes(live, make):
    definitions, anomaly, page = overflow(make, 1, seq=9).messages()
    live.on_message(make.hello(nproc=2), definitions)
    live.verdict.tick()
    assert live.said == []
    live.on_message(anomaly)
    live.verdict.tick()
    (line,) = live.said
    assert line.startswith("1970-01-01T00:00:00.250Z the verdict so far: supported: Rank 1 on h0 overflowed first")
    live.on_message(*overflow(make, 0, seq=3).messages())
    live.clock.now += 10
    live.verdict.tick()
    assert "Rank 0 on h0 overflowed first" in live.said[-1]
    live.on_message(page)
    live.clock.now += 10
    live.verdict.tick()
    assert "Rank 0 on h0 overflowed first" in live.said[-1]


def test_pages_without_an_anomaly_are_not_decided_about(live, make):
    batch = make.Batch(0)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    live.on_message(make.hello(), *batch.messages())
    live.verdict.tick()
    assert live.clock.used == 0


def test_it_takes_a_share_of_the_time_and_an_anomaly_waits_less(live, make):
    live.on_message(make.hello(nproc=3), *overflow(make, 2, seq=9).messages())
    live.verdict.tick()
    live.on_message(overflow(make, 1, seq=5).page_message())
    live.clock.now += 0.03
    live.verdict.tick()
    assert len(live.said) == 1, "10 ms of work pay for 50 ms"
    live.on_message(*overflow(make, 1, seq=5).messages())
    live.verdict.tick()
    assert "Rank 1 " in live.said[-1]


def test_where_there_is_little_of_a_processor_it_leaves_most_of_the_time_to_what_comes(live, make):
    """A decision of 10 ms takes 0.2 s there."""
    decide, decided = live.verdict._decide, []

    def slowly() -> None:
        decide()
        live.clock.now += 0.2
        decided.append(live.clock.now)

    live.verdict._decide = slowly
    live.on_message(make.hello(nproc=3), *overflow(make, 2, seq=9).messages())
    for _ in range(100):
        live.on_message(overflow(make, 1, seq=5).page_message())
        live.verdict.tick()
        live.clock.now += 0.05
    assert len(decided) == 5, "0.2 s of work, then 1 s for what comes"


def test_many_anomalies_at_once_take_half_a_processor(live, make):
    live.on_message(make.hello(nproc=400))
    for rank in range(300):
        live.on_message(*overflow(make, rank, seq=1000 - rank).messages()[:2])
        live.verdict.tick()
    assert len(live.said) == 100, "1 s is saved up, and each decision takes 10 ms"
    live.clock.now += 0.1
    live.verdict.tick()
    assert "Rank 299 " in live.said[-1]


def test_it_goes_on_by_itself_until_all_ranks_are_diagnosed(live, make):
    for rank in range(20):
        live.on_message(*overflow(make, rank, seq=100 - rank).messages())
    turns = 0
    while live.verdict._changed:
        live.verdict.tick()
        live.clock.now += 1
        turns += 1
    assert (turns, live.folded.is_behind) == (3, False)
