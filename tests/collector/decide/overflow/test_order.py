"""Which of two ranks' diagnoses came first, by the collectives that they share."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.overflow.order import before, earliest
from gpuwatch.collector.diagnose.local_diagnosis import from_event


def at(make, rank=0, **place):
    """A diagnosis at a place."""
    batch = make.Batch(rank, **place)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    return from_event(batch.anomaly)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"0": 4}, {"0": 5}, "before"),
        ({"0": 5}, {"0": 5}, "neither"),
        ({"0": 4, "dp": 9}, {"0": 5, "tp": 1}, "before"),
        ({"0": 4, "dp": 9}, {"0": 4, "dp": 10}, "before"),
        ({"0": 4, "dp": 9}, {"0": 5, "dp": 8}, "neither"),
        ({"dp": 9}, {"tp": 1}, "neither"),
    ],
    ids=str,
)
def test_by_the_groups_that_both_are_in(make, left, right, expected):
    a, b = at(make, 0, clock=left, seq=99), at(make, 1, clock=right, seq=99)
    assert (before(a, b), before(b, a)) == (expected == "before", False)


def test_clocks_are_believed_more_than_the_sum_over_groups(make):
    a, b = at(make, 0, clock={"0": 4, "dp": 90}, seq=94), at(make, 1, clock={"0": 5}, seq=5)
    assert before(a, b)
    assert not before(b, a)


def test_the_frame_breaks_a_tie_where_there_is_one_group(make):
    """The value was made two collectives before it was seen."""
    a, b = at(make, 0, clock={"0": 5}, seq=3), at(make, 1, clock={"0": 5}, seq=5)
    assert before(a, b)
    a, b = at(make, 0, clock={"0": 5, "dp": 1}, seq=3), at(make, 1, clock={"0": 5, "dp": 1}, seq=5)
    assert not before(a, b)


def test_sums_over_groups_that_nobody_shares_say_nothing(make):
    assert not before(at(make, 0, clock={"dp": 1}, seq=1), at(make, 1, clock={"tp": 5}, seq=5))


def test_without_clocks_the_count_and_without_a_group_the_batch(make):
    assert before(at(make, 0, seq=3), at(make, 1, seq=4, clock={"0": 4}))
    assert before(at(make, 0, seq=-1, batch=3), at(make, 1, seq=-1, batch=4))
    assert not before(at(make, 0, seq=3, batch=3), at(make, 1, seq=3, batch=4))


def test_the_earliest_are_those_that_nothing_came_before(make):
    a, b, c = (at(make, rank, clock={"0": clock}) for rank, clock in enumerate((4, 4, 5)))
    assert earliest([c, b, a]) == [b, a]


def test_a_ring_has_no_first(make):
    clocks = ({"x": 1, "z": 2}, {"x": 2, "y": 1}, {"y": 2, "z": 1})
    ring = [at(make, rank, clock=clock) for rank, clock in enumerate(clocks)]
    assert earliest(ring) == ring
