"""When a node agent beats."""

from __future__ import annotations

from gpuwatch.launcher.agent.collector_link import BEAT_S, UNANSWERED_S, BeatClock


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
