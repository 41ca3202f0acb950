from __future__ import annotations

from gpuwatch.core.host import STEP_S, OwnClock


def test_it_goes_as_the_machines_clock_while_it_is_asked_often():
    times = iter([100.0, 100.1, 100.1, 100.5])
    clock = OwnClock(lambda: next(times))
    assert [round(clock.now(), 6) for _ in range(3)] == [0.1, 0.1, 0.5]


def test_it_stands_still_while_the_process_does():
    times = iter([100.0, 100.1, 124.1, 124.2])
    clock = OwnClock(lambda: next(times))
    assert [round(clock.now(), 6) for _ in range(3)] == [0.1, 0.1 + STEP_S, 0.2 + STEP_S]


def test_it_never_runs_backwards():
    times = iter([100.0, 90.0, 90.5])
    clock = OwnClock(lambda: next(times))
    assert [clock.now(), clock.now()] == [0.0, 0.5]
