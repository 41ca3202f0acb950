"""The forecast of one series: told when it can be, in a range that holds; else nothing."""

from __future__ import annotations

import math

import numpy
import pytest
from gpuwatch.launcher.agent.forecast import WINDOWS, forecast

LIMIT = 65504.0

GROWING = {
    "a power of two in ten batches": lambda t: 2 ** (t / 10),
    "one in forty": lambda t: 2 ** (t / 40),
    "like the square": lambda t: (t + 1.0) ** 2,
    "in proportion": lambda t: 300.0 * (t + 1),
}
HEALTHY = {
    "like the square root": lambda t: 1500 * math.sqrt(t + 1),
    "flattens": lambda t: 30000 * (1 - math.exp(-t / 50)),
    "like the logarithm": lambda t: 4000 * math.log(t + 2),
    "stands": lambda t: 30000.0,
    "falls": lambda t: 60000 * 0.99**t,
    "jumps once": lambda t: 10.0 if t < 200 else 5000.0,
    "swings": lambda t: 2000 * 2 ** math.sin(t / 30),
}


def course(grows, noise, batches=700, seed=0):
    """(batch in which it passed, the first forecast and in which batch it was told)"""
    rng = numpy.random.default_rng(seed)
    numbers, told = [], None
    for batch in range(batches):
        numbers.append(grows(batch) * 2 ** rng.normal(0, noise))
        if numbers[-1] > LIMIT:
            return batch, told
        if told is None and batch % 4 == 0:
            kept = numbers[-WINDOWS[-1] :]
            found = forecast(range(batch + 1 - len(kept), batch + 1), kept, LIMIT)
            told = (batch, found) if found is not None else None
    return None, told


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("grows", GROWING.values(), ids=GROWING)
def test_what_grows_is_told_long_before_it_passes(grows, noise):
    passed, (batch, told) = course(grows, noise)
    assert told.earliest - 1 <= passed - batch <= told.latest + 1
    assert passed - batch >= 20
    assert told.earliest <= told.after <= told.latest


def test_a_noisy_one_is_told_later_and_in_a_wider_range():
    _, (clean_batch, clean) = course(GROWING["one in forty"], 0.02)
    _, (batch, told) = course(GROWING["one in forty"], 0.3)
    assert batch >= clean_batch - 16
    assert (told.latest - told.earliest) / told.after > (clean.latest - clean.earliest) / clean.after


@pytest.mark.quick(5)
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("grows", HEALTHY.values(), ids=HEALTHY)
def test_what_does_not_go_on_so_is_not_told(grows, noise):
    assert course(grows, noise)[1] is None


def test_a_few_wild_batches_turn_no_line():
    calm = [2 ** (t / 10) for t in range(100)]
    wild = list(calm)
    for at in (10, 45, 70, 90):
        wild[at] *= 30
    assert forecast(range(100), wild, LIMIT).after == pytest.approx(forecast(range(100), calm, LIMIT).after, abs=4)


@pytest.mark.parametrize("last", [math.inf, math.nan, 70000.0])
def test_what_has_passed_already_is_no_forecast(last):
    assert forecast(range(101), [2 ** (t / 10) for t in range(100)] + [last], LIMIT) is None


def test_what_was_not_measured_or_is_too_short_is_no_forecast():
    assert forecast([], [], LIMIT) is None
    assert forecast(range(8), [2.0**t for t in range(8)], LIMIT) is None
    assert forecast(range(100), [-1.0] * 100, LIMIT) is None
    assert forecast(range(100), [0.0] * 100, LIMIT) is None


def test_batches_may_lie_apart():
    batches = [*range(0, 64, 4), *range(64, 96, 2), *range(96, 110)]
    told = forecast(batches, [2 ** (t / 10) for t in batches], LIMIT)
    assert told.after == pytest.approx(160 - batches[-1], abs=2)
