"""`--every auto`: what watching costs, by the times of steps that a clock of the test gives, and what follows."""

from __future__ import annotations

import pytest
from gpuwatch.worker.record.watch_pace import ALERT, PAIRS, WARM_UP, WatchPace

CHOSEN = WARM_UP + 2 * PAIRS


def run(pace: WatchPace, steps: int, cost: float, extra=lambda step: 0.0, since: int = 0):
    """(choices, which steps were watched whole) of steps that take 1 ms, and `cost` more where they are watched."""
    choices, whole, now = [], [], 0.0
    for step in range(since, since + steps):
        choice = pace.step_begins(step, int(now))
        choices += [(step, choice)] if choice is not None else []
        whole.append(pace.is_whole)
        now += 1e6 * ((1 + cost if pace.is_whole else 1) + extra(step))
    return choices, whole


@pytest.mark.parametrize(("cost", "every"), [(0.0, 1), (0.049, 1), (0.051, 16), (0.14, 32), (0.3, 64), (9.0, 64)])
def test_the_choice_follows_the_cost(cost, every):
    choices, whole = run(WatchPace(whole=False), CHOSEN + 256, cost)
    ((step, choice),) = choices
    assert (step, choice.every) == (CHOSEN, every)
    assert choice.cost == pytest.approx(cost, abs=1e-6)
    assert choice.margin == pytest.approx(0, abs=1e-6)
    assert sum(whole[CHOSEN:]) == pytest.approx(256 / every, abs=1)
    assert all(whole[:WARM_UP])
    assert sum(whole[WARM_UP:CHOSEN]) == PAIRS


@pytest.mark.parametrize("period", [2, 4, 8, 50])
def test_what_the_script_does_now_and_then_is_not_the_cost_of_watching(period):
    ((_, choice),) = run(WatchPace(whole=False), CHOSEN + 1, 0.0, lambda step: 0.5 * (step % period == 0))[0]
    assert choice.every == 1
    ((_, choice),) = run(WatchPace(whole=False), CHOSEN + 1, 0.4, lambda step: 0.5 * (step % period == 0))[0]
    assert choice.every > 1


def test_a_value_out_of_line_has_the_next_steps_watched_whole():
    pace = WatchPace(whole=False)
    run(pace, CHOSEN + 1, 0.3)
    assert pace.alert()
    assert not pace.alert(), "once"
    _, whole = run(pace, ALERT + 32, 0.3, since=CHOSEN + 1)
    assert all(whole[:ALERT])
    assert not all(whole[ALERT:])


def test_an_alert_in_the_pairs_begins_them_anew():
    pace = WatchPace(whole=False)
    run(pace, WARM_UP + 5, 0.3)
    pace.alert()
    choices, whole = run(pace, ALERT + 2 * PAIRS + 1, 0.3, since=WARM_UP + 5)
    assert all(whole[:ALERT])
    ((_, choice),) = choices
    assert choice.cost == pytest.approx(0.3, abs=1e-6)


def test_nothing_is_left_out_after_an_overflow_or_of_compiled_code():
    choices, whole = run(WatchPace(whole=True), CHOSEN + 64, 0.3)
    assert choices == []
    assert all(whole)
    pace = WatchPace(whole=False)
    run(pace, WARM_UP + 3, 0.3)
    pace.watch_all()
    choices, whole = run(pace, CHOSEN + 64, 0.3, since=WARM_UP + 3)
    assert choices == []
    assert all(whole)
    assert not pace.alert(), "all steps are watched already"


def test_batches_of_one_step_are_one():
    pace = WatchPace(whole=False)
    run(pace, CHOSEN + 1, 0.3)
    kinds = []
    for step in range(CHOSEN + 1, CHOSEN + 40):
        kinds.append({(pace.step_begins(step, 0), pace.is_whole)[1] for _ in range(4)})
    assert all(len(kind) == 1 for kind in kinds)
    assert {True} in kinds
    assert {False} in kinds
