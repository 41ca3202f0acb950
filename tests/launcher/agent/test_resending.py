from __future__ import annotations

from itertools import pairwise

from gpuwatch.launcher.agent.collector_link import LONGEST_RESEND_S, RESEND_S, ResendClock


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
