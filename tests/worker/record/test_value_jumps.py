"""Which value is out of line with those before it."""

from __future__ import annotations

import math
import random

from gpuwatch.worker.record.value_jumps import FEWEST, JUMP, LAST, ValueJumps


def test_a_value_far_above_those_before_it_is_a_jump():
    jumps = ValueJumps()
    assert not any(jumps.is_jump("output", 1 + number / 10) for number in range(FEWEST))
    assert not jumps.is_jump("output", 0.9 * JUMP)
    assert jumps.is_jump("output", 1.1 * 0.9 * JUMP * JUMP)
    assert not jumps.is_jump("gradient", 1e30), "another tensor, and its first value"


def test_the_first_values_are_no_jump():
    jumps = ValueJumps()
    assert not any(jumps.is_jump("output", JUMP ** (2 * number)) for number in range(FEWEST))
    assert jumps.is_jump("output", JUMP ** (2 * FEWEST))


def test_it_is_compared_with_the_last_values_alone():
    jumps = ValueJumps()
    jumps.is_jump("output", 1e6)
    assert not any(jumps.is_jump("output", 1.0) for _ in range(LAST - 1))
    assert not jumps.is_jump("output", 1e4), "the large one is among the last"
    for _ in range(LAST):
        jumps.is_jump("output", 1.0)
    assert jumps.is_jump("output", 1e4)


def test_what_is_not_finite_or_follows_zeros_is_no_jump():
    jumps = ValueJumps()
    for _ in range(FEWEST):
        assert not jumps.is_jump("output", 0.0)
    assert not jumps.is_jump("output", 1.0), "a weight that starts at zero"
    assert not jumps.is_jump("output", math.inf)
    assert not jumps.is_jump("output", math.nan)
    assert jumps.is_jump("output", 2 * JUMP), "what was not finite is not among those before"


def test_gradients_of_a_healthy_training_do_not_jump():
    draw, jumps = random.Random(0), ValueJumps()
    assert not any(jumps.is_jump("gradient", draw.lognormvariate(0, 0.7)) for _ in range(5000))


def test_many_tensors_are_forgotten():
    jumps = ValueJumps()
    for number in range(1000):
        jumps.is_jump(number, 1.0)
    assert len(jumps._last) <= 256
