"""When a node agent sends again, when it beats, and how it measures the clock of the collector."""

from __future__ import annotations

from itertools import pairwise

from gpuwatch.launcher.agent.collector_link import (
    BEAT_S,
    KEPT,
    LONGEST_RESEND_S,
    RESEND_S,
    UNANSWERED_S,
    BeatClock,
    ClockExchange,
    ClockOffset,
    ResendClock,
)


def test_a_slow_collector_that_answers_is_sent_nothing_twice():
    resending = ResendClock(0.0)
    for number in range(1, 200):
        now = number / 2
        resending.beat(number, 40)
        resending.moved(now)
        assert not resending.is_lost(number, 40, now)
        assert not resending.is_due(now + 0.1)


def test_what_had_not_come_before_an_answered_beat_is_lost():
    resending = ResendClock(0.0)
    resending.beat(1, 40)
    resending.beat(2, 41)
    assert not resending.is_lost(1, 40, 0.1)
    assert resending.is_lost(2, 40, 0.2)


def test_beats_that_left_before_it_was_sent_again_tell_nothing():
    resending = ResendClock(0.0)
    resending.beat(1, 40)
    resending.beat(2, 40)
    assert resending.is_lost(1, 39, 0.1)
    assert not resending.is_lost(2, 39, 10.0)


def test_what_is_never_accepted_is_sent_less_and_less_often():
    resending, at = ResendClock(0.0), []
    for tick in range(1, 2000):
        now = tick / 2
        resending.beat(tick, 40)
        resending.moved(now)
        if resending.is_lost(tick, 39, now):
            at.append(now)
    pauses = [later - earlier for earlier, later in pairwise(at)]
    assert pauses[:3] == [RESEND_S, 2 * RESEND_S, 4 * RESEND_S]
    assert pauses[-1] == LONGEST_RESEND_S


def test_silence_is_a_reason_and_an_older_collector_says_nothing():
    resending = ResendClock(0.0)
    resending.beat(1, 40)
    assert not resending.is_lost(1, -1, 1.0)
    assert not resending.is_due(RESEND_S)
    assert resending.is_due(RESEND_S + 0.1)
    assert not resending.is_due(RESEND_S + 0.2)
    resending.acknowledged(10.0)
    resending.moved(10.0)
    assert not resending.is_due(10.0 + RESEND_S)
    assert resending.is_due(10.1 + RESEND_S)


# When a node agent beats.


def test_the_first_is_due_at_once_and_answered_ones_come_twice_a_second():
    beats = BeatClock()
    assert beats.is_due(100.0)
    for number in range(1, 4):
        beats.sent(number, 100.0 + number)
        beats.answered(number)
        assert not beats.is_due(100.0 + number + 0.9 * BEAT_S)
        assert beats.is_due(100.0 + number + BEAT_S)


def test_without_an_answer_it_waits_longer_and_beats_all_the_same():
    beats = BeatClock()
    beats.sent(1, 100.0)
    assert not beats.is_due(100.0 + BEAT_S)
    assert beats.is_due(100.0 + UNANSWERED_S)


def test_the_answer_to_an_earlier_one_is_not_its_answer():
    beats = BeatClock()
    beats.sent(1, 100.0)
    beats.sent(2, 102.0)
    beats.answered(1)
    assert not beats.is_due(102.0 + BEAT_S)
    beats.answered(2)
    assert beats.is_due(102.0 + BEAT_S)


def test_nothing_is_known_before_an_answer():
    assert ClockOffset().best is None


def test_the_offset_is_taken_from_the_middle_of_the_exchange():
    clock = ClockOffset()
    clock.on_message(1_000, 51_500, 2_000)
    assert clock.best == ClockExchange(round_trip_ns=1_000, offset_ns=50_000)


def test_the_quickest_exchange_counts_whenever_it_came():
    clock = ClockOffset()
    clock.on_message(1_000, 90_000, 21_000)
    clock.on_message(30_000, 80_100, 30_200)
    clock.on_message(40_000, 99_000, 90_000)
    assert clock.best == ClockExchange(200, 50_000)


def test_a_collector_that_is_behind_has_a_negative_offset():
    clock = ClockOffset()
    clock.on_message(1_000_000, 500_100, 1_000_200)
    assert clock.best == ClockExchange(200, -500_000)


def test_an_older_collector_and_a_clock_that_was_set_back_tell_nothing():
    clock = ClockOffset()
    clock.on_message(1_000, 0, 2_000)
    clock.on_message(0, 5_000, 2_000)
    clock.on_message(9_000, 5_000, 2_000)
    assert clock.best is None


def test_a_clock_that_was_set_is_believed_when_the_old_exchanges_are_gone():
    clock = ClockOffset()
    clock.on_message(1_000, 1_050, 1_100)
    for number in range(1, KEPT + 1):
        clock.on_message(number, 1_000_000 + number, number + 500)
    assert clock.best is not None
    assert clock.best.round_trip_ns == 500
