"""What is kept of a long run, and that no count is lost by thinning."""

from __future__ import annotations

import numpy
from gpuwatch.core.wire.columns import unpack_samples
from gpuwatch.launcher.agent.telemetry import MOST_SERIES, NEWEST, SENT_BYTES, NodeRecord

S = 1_000_000_000
BEGAN = 1_700_000_000 * S


def unpacked(message):
    names = [(name.of, name.what) for name in message.series]
    seconds, values = unpack_samples(message.samples, len(names))
    return names, seconds, values


def test_a_run_of_days_takes_bounded_room_and_loses_no_count():
    record = NodeRecord()
    last = 4 * 24 * 3600 // 5
    for n in range(last + 1):
        record.add(BEGAN + 5 * n * S, {("", "cpu"): 2.5 * n, ("GPU-0", "temperature"): 40.0 + n % 7})
    message = record.message(0, [])
    names, seconds, values = unpacked(message)
    assert message.began_ns == BEGAN
    assert len(seconds) < 1000
    assert seconds[0] == 0
    assert seconds[-1] == 5 * last
    assert seconds[-NEWEST:].tolist() == [5.0 * n for n in range(last - NEWEST + 1, last + 1)]
    cpu = values[:, names.index(("", "cpu"))]
    numpy.testing.assert_allclose(cpu[1:] / numpy.diff(seconds), 0.5)
    assert cpu[0] == -1
    assert cpu[1:].sum() == 2.5 * last


def test_many_series_are_sent_with_fewer_samples():
    record = NodeRecord()
    for n in range(1000):
        record.add(BEGAN + 5 * n * S, {(f"rank {rank}", "rss"): 1.0 for rank in range(MOST_SERIES + 3)})
    message = record.message(0, [])
    names, seconds, values = unpacked(message)
    assert len(names) == MOST_SERIES
    assert len(seconds) * 4 * len(names) <= SENT_BYTES
    assert (numpy.diff(seconds)[-len(seconds) // 2 + 2 :] == 5).all()
    assert numpy.isfinite(values).all()


def test_a_series_that_comes_later_is_unknown_before():
    record = NodeRecord()
    record.add(BEGAN, {("", "memory_used"): 1.0})
    record.add(BEGAN + S, {("", "memory_used"): 2.0, ("rank 0", "rss"): 3.0})
    names, _, values = unpacked(record.message(0, []))
    numpy.testing.assert_array_equal(values, [[1.0, numpy.nan], [2.0, 3.0]])
    assert names == [("", "memory_used"), ("rank 0", "rss")]


def test_a_clock_that_was_set_back_leaves_times_that_ascend():
    record = NodeRecord()
    for at in (100, 105, 3, 8):
        record.add(at * S, {("", "cpu"): float(at)})
    _, seconds, _ = unpacked(record.message(0, []))
    assert seconds.tolist() == [0.0, 5.0]


def test_nothing_known_is_nothing_to_send():
    assert NodeRecord().message(0, []) is None
