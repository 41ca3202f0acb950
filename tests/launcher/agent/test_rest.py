"""When a rank has rested for too long, and how long it may."""

from __future__ import annotations

import pytest
from gpuwatch.launcher.agent.batch_history import LAST_STEPS
from gpuwatch.launcher.agent.rank_stalls import (
    BEFORE_FIRST_BATCH_TIMES,
    LONGEST_REST_TIMES,
    TAKES_LONG_TIMES,
    HangLimit,
    RankRest,
    fixed_limit,
    learned_limit,
)

# How long a rank may rest. Time is a number that the test sets.


LIMIT_S = 100.0
LIMIT = fixed_limit(LIMIT_S)


def told(rest, now, *, phase="forward", batch=5):
    return rest.is_told(phase, batch, LIMIT, now)


def test_a_rank_that_moves_is_not_told():
    rest = RankRest(0.0)
    for second in range(1000):
        rest.moved((second,), 5, float(second))
        assert not told(rest, second + 0.5)


def test_a_rest_is_told_once_and_again_when_it_is_twice_as_long():
    rest = RankRest(0.0)
    rest.moved((1,), 5, 0.0)
    times = [second for second in range(900) if told(rest, float(second))]

    assert times == [101, 201, 401, 801]


def test_after_it_has_moved_the_next_rest_is_told_anew():
    rest = RankRest(0.0)
    rest.moved((1,), 0, 0.0)
    assert told(rest, 101.0)
    rest.moved((2,), 0, 102.0)
    assert not told(rest, 150.0)
    assert told(rest, 203.0)


def test_before_the_first_batch_it_may_rest_longer():
    rest = RankRest(0.0)
    rest.moved((1,), -1, 0.0)

    assert not told(rest, BEFORE_FIRST_BATCH_TIMES * LIMIT_S, batch=-1)
    assert told(rest, BEFORE_FIRST_BATCH_TIMES * LIMIT_S + 1, batch=-1)


def test_a_rest_that_it_came_back_from_is_allowed_again_and_three_times_as_long():
    rest = RankRest(0.0)
    rest.moved((1,), 5, 0.0)
    rest.moved((2,), 5, 80.0)  # a checkpoint

    assert not told(rest, 80.0 + LONGEST_REST_TIMES * 80.0)
    assert told(rest, 81.0 + LONGEST_REST_TIMES * 80.0)


def test_what_came_before_the_first_batch_tells_nothing_of_later_rests():
    rest = RankRest(0.0)
    rest.moved((1,), -1, 0.0)
    rest.moved((2,), 0, 90.0)  # torch was imported, the model compiled

    assert told(rest, 191.0)


def test_a_start_after_which_several_batches_pass_between_two_looks_is_no_rest_of_theirs():
    rest = RankRest(0.0)
    rest.moved((1,), -1, 0.0)
    rest.moved((2,), 4, 90.0)

    assert told(rest, 191.0)


def test_a_preflight_and_a_start_have_deadlines_of_their_own():
    rest = RankRest(0.0)
    for phase in ("starting", "preflight", "unwatched"):
        assert not told(rest, 1e6, phase=phase)


def test_a_rank_that_does_not_end_is_told():
    for phase in ("finished", "raised"):
        rest = RankRest(0.0)
        assert told(rest, 1e6, phase=phase)


def test_where_it_compiles_or_saves_it_may_rest_longer():
    rest = RankRest(0.0)
    rest.moved((1,), 5, 0.0)

    assert rest.limit_s(5, LIMIT) == LIMIT_S
    assert rest.limit_s(5, LIMIT, takes_long=True) == TAKES_LONG_TIMES * LIMIT_S
    assert rest.limit_s(-1, LIMIT, takes_long=True) == BEFORE_FIRST_BATCH_TIMES * LIMIT_S


def test_what_its_steps_take_says_nothing_of_a_compilation_or_a_first_batch():
    rest = RankRest(0.0)
    rest.moved((1,), 5, 0.0)
    learned = HangLimit(60.0, 300.0)

    assert rest.limit_s(5, learned) == 60.0
    assert rest.limit_s(5, learned, takes_long=True) == TAKES_LONG_TIMES * 300.0
    assert rest.limit_s(-1, learned) == BEFORE_FIRST_BATCH_TIMES * 300.0


def test_what_passed_while_nobody_looked_was_no_rest():
    """The laptop was asleep, or the agent was stopped with all the others."""
    rest = RankRest(0.0)
    rest.moved((1,), 5, 0.0)
    rest.paused(500.0)

    assert not told(rest, 590.0)
    assert rest.seconds(590.0) == 90.0
    assert told(rest, 601.0)


# How long a rank may stand still, learned from its steps.


@pytest.mark.parametrize(
    ("steps_s", "within_s", "elsewhere_s"),
    [
        ([], 300, 300),
        ([0.1, 0.1], 300, 300),
        ([0.1, 0.1, 0.1], 60, 300),
        ([90.0, 0.1, 0.1], 900, 900),  # the first one compiles
        ([5.9, 6.0, 5.9], 60, 300),
        ([12.0, 6.0, 6.0], 120, 300),
        ([45.0] * 10, 450, 450),
    ],
)
def test_it_is_ten_times_the_slowest_of_the_last_steps(steps_s, within_s, elsewhere_s):
    assert learned_limit(steps_s) == HangLimit(within_s, elsewhere_s)


def test_a_slow_step_is_forgotten():
    assert learned_limit([90.0] + [0.1] * (LAST_STEPS - 1)).within_steps_s == 900
    assert learned_limit([90.0] + [0.1] * LAST_STEPS).within_steps_s == 60
