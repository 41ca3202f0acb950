from __future__ import annotations

from gpuwatch.launcher.agent.collector_link import KEPT, ClockExchange, ClockOffset


def test_nothing_is_known_before_an_answer():
    assert ClockOffset().best is None


def test_the_offset_is_taken_from_the_middle_of_the_exchange():
    clock = ClockOffset()
    clock.hear(1_000, 51_500, 2_000)
    assert clock.best == ClockExchange(round_trip_ns=1_000, offset_ns=50_000)


def test_the_quickest_exchange_counts_whenever_it_came():
    clock = ClockOffset()
    clock.hear(1_000, 90_000, 21_000)
    clock.hear(30_000, 80_100, 30_200)
    clock.hear(40_000, 99_000, 90_000)
    assert clock.best == ClockExchange(200, 50_000)


def test_a_collector_that_is_behind_has_a_negative_offset():
    clock = ClockOffset()
    clock.hear(1_000_000, 500_100, 1_000_200)
    assert clock.best == ClockExchange(200, -500_000)


def test_an_older_collector_and_a_clock_that_was_set_back_tell_nothing():
    clock = ClockOffset()
    clock.hear(1_000, 0, 2_000)
    clock.hear(0, 5_000, 2_000)
    clock.hear(9_000, 5_000, 2_000)
    assert clock.best is None


def test_a_clock_that_was_set_is_believed_when_the_old_exchanges_are_gone():
    clock = ClockOffset()
    clock.hear(1_000, 1_050, 1_100)
    for number in range(1, KEPT + 1):
        clock.hear(number, 1_000_000 + number, number + 500)
    assert clock.best is not None
    assert clock.best.round_trip_ns == 500
