"""Who is slow, over made numbers: seconds in (outside, forward, backward, waiting, optimizer) of each step."""

from __future__ import annotations

import random

import numpy
import pytest
from gpuwatch.collector.assemble.stragglers import LEAST_STEPS, WARM_UP, RankTimes, find_stragglers
from gpuwatch.core.recorder.layout import PARTS

FORWARD, OUTSIDE = PARTS.index("forward"), PARTS.index("outside")


def job(own: list[list[list[float]]]) -> dict[int, RankTimes]:
    """Ranks in lockstep. `own[rank][step]`: seconds in each part but waiting; all wait for the last one of a step."""
    table = numpy.array(own, dtype=float)
    table = numpy.insert(table, PARTS.index("waiting"), 0.0, axis=2)
    total = table.sum(axis=2)
    table[:, :, PARTS.index("waiting")] = total.max(axis=0) - total
    return {rank: (list(range(1, table.shape[1] + 1)), table[rank]) for rank in range(len(own))}


def steps(count: int, *, forward: float = 0.05, outside: float = 0.01) -> list[list[float]]:
    return [[outside, forward, 0.03, 0.01] for _ in range(count)]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 512])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_takes_1_3_times_as_long_is_named_with_its_cost(world, slow):
    own = [steps(40) for _ in range(world)]
    own[slow] = steps(40, forward=0.08)  # 0.13 in place of 0.10

    found = find_stragglers(job(own))

    assert found is not None
    (named,) = found.slow
    assert (named.rank, named.how, named.part) == (slow, "constantly", "forward")
    assert named.cost == pytest.approx(0.03 / 0.13)
    assert (named.own_s, named.others_s) == (pytest.approx(0.13), pytest.approx(0.10))
    assert (found.steps, found.step_s) == (40 - WARM_UP, pytest.approx(0.13))


def test_a_slow_loader_is_outside_of_the_forward():
    own = [steps(40), steps(40), steps(40, outside=0.2)]

    found = find_stragglers(job(own))

    assert found is not None
    assert [(slow.rank, slow.part) for slow in found.slow] == [(2, "outside")]


def test_now_and_then_is_told_as_that():
    own = [steps(80) for _ in range(4)]
    for step in range(5, 80, 5):
        own[1][step][FORWARD] = 0.3

    found = find_stragglers(job(own))

    assert found is not None
    (named,) = found.slow
    assert (named.rank, named.how, named.slow_steps, named.part) == (1, "now and then", 15, "forward")


@pytest.mark.parametrize("seed", range(30))
def test_healthy_ranks_with_noise_are_told_nothing(seed):
    draw = random.Random(seed)
    own = [
        [[abs(draw.gauss(second, 0.3 * second)) for second in step] for step in steps(60)]
        for _ in range(draw.choice([2, 3, 4, 8]))
    ]

    found = find_stragglers(job(own))

    assert found is not None
    assert found.slow == []


@pytest.mark.parametrize("seed", range(30))
def test_pauses_that_hit_any_rank_are_nobodys(seed):
    """A garbage collector, a disk, a neighbour on the host."""
    draw = random.Random(seed)
    own = [steps(200) for _ in range(4)]
    for step in range(200):
        if draw.random() < 0.3:
            own[draw.randrange(4)][step][OUTSIDE] += 0.1

    found = find_stragglers(job(own))

    assert found is not None
    assert found.slow == []


def test_one_incident_is_no_straggler():
    own = [steps(60) for _ in range(3)]
    own[2][30][OUTSIDE] = 60.0

    found = find_stragglers(job(own))

    assert found is not None
    assert found.slow == []


def test_slow_in_one_half_of_the_run_alone_is_not_told():
    own = [steps(60) for _ in range(3)]
    own[2][33:] = steps(27, forward=0.2)

    found = find_stragglers(job(own))

    assert found is not None
    assert found.slow == []


def test_of_two_slow_ranks_none_is_named():
    own = [steps(40) for _ in range(4)]
    own[1] = own[2] = steps(40, forward=0.1)

    found = find_stragglers(job(own))

    assert found is not None
    assert found.slow == []


def test_ranks_that_do_not_wait_for_each_other_are_not_compared():
    """Searches over parameters, or waiting that the host does not see: nobody waits, so nobody is waited for."""
    own = [steps(40), steps(40, forward=0.5), steps(40)]
    ranks = job(own)
    for _, parts in ranks.values():
        parts[:, PARTS.index("waiting")] = 0

    found = find_stragglers(ranks)

    assert found is not None
    assert found.slow == []


@pytest.mark.parametrize("ranks", [0, 1])
def test_nothing_to_compare(ranks):
    assert find_stragglers(dict(list(job([steps(40), steps(40)]).items())[:ranks])) is None


def test_too_few_steps_in_common():
    ranks = job([steps(40), steps(40)])
    few = tuple(column[: WARM_UP + LEAST_STEPS - 1] for column in ranks[1])

    assert find_stragglers({0: ranks[0], 1: few}) is None


def test_below_a_tenth_nothing_is_told():
    own = [steps(40) for _ in range(3)]
    own[1] = steps(40, forward=0.058)

    found = find_stragglers(job(own))

    assert found is not None
    assert found.slow == []


@pytest.mark.parametrize(("count", "named"), [(17, []), (199, []), (200, [1])])
def test_short_steps_differ_by_chance_unless_there_are_many(count, named):
    own = [[[0.0, forward, 0.001, 0.0]] * (count + WARM_UP) for forward in (0.0013, 0.0047, 0.0013)]

    found = find_stragglers(job(own))

    assert found is not None
    assert (found.steps, [slow.rank for slow in found.slow]) == (count, named)
