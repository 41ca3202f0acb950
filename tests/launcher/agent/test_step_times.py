"""The sample of a rank's steps that is sent."""

from __future__ import annotations

import random
import zlib

import numpy
import pytest
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder.layout import PARTS, STEP_BYTES, STEP_ENTRY, STEPS, TimedStep, read_steps
from gpuwatch.core.wire.columns import MOST_STEPS, pack_steps, unpack_steps
from gpuwatch.launcher.agent.batch_history import BLOCK, RankStepTimes


def sample_of(numbers):
    steps = RankStepTimes()
    for number in numbers:
        steps.add(TimedStep(number, (number * 1000, 2000, 3000, 4000, 5000)))
    event = steps.event(RunPosition(0))
    assert event is not None
    return event, unpack_steps(event.steps)


@pytest.mark.parametrize("count", [1, 100, MOST_STEPS, MOST_STEPS + 1, 5000, 40_000])
def test_it_is_bounded_and_of_whole_blocks_over_the_whole_run(count):
    event, (numbers, parts) = sample_of(range(1, count + 1))

    assert len(numbers) <= MOST_STEPS
    assert len(numbers) == count if count <= MOST_STEPS else len(numbers) >= MOST_STEPS // 2
    assert numbers[0] < BLOCK
    assert count - numbers[-1] < max(1, 2 * BLOCK * count // (MOST_STEPS // 2))
    whole = {number // BLOCK for number in numbers} - {0, numbers[-1] // BLOCK}
    assert all(block * BLOCK + n in numbers for block in whole for n in range(BLOCK))
    assert parts[:, 0].tolist() == pytest.approx([number / 1e6 for number in numbers])
    assert event.total_s[1:] == pytest.approx([count * ns / 1e9 for ns in (2000, 3000, 4000, 5000)])


def test_ranks_that_have_timed_other_steps_have_a_sample_in_common():
    draw = random.Random(0)
    found = [set(sample_of([number for number in range(1, 20_000) if draw.random() < 0.9])[1][0]) for _ in range(4)]

    assert len(set.intersection(*found)) > MOST_STEPS // 4


def test_no_step_no_event():
    assert RankStepTimes().event(RunPosition(0)) is None


@pytest.mark.parametrize("data", [b"", b"x", zlib.compress(b"12345"), zlib.compress(bytes(24 * (MOST_STEPS + 1)))])
def test_what_no_agent_sends_is_refused(data):
    if data == b"":
        assert unpack_steps(pack_steps([]))[0] == []
    with pytest.raises(ValueError, match="steps"):
        unpack_steps(data if data else zlib.compress(b"1"))


def test_a_part_that_is_too_long_is_shown_as_the_longest():
    _, parts = unpack_steps(pack_steps([TimedStep(1, (10**18, 0, 0, 0, 0))]))

    assert parts[0, 0] == pytest.approx(4294.967295)


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_are_read_without_harm(seed):
    data = bytearray(random.Random(seed).randbytes(STEPS * STEP_BYTES))
    STEP_ENTRY.pack_into(data, 0, 7, 3, 1, 2, 3, 4, 5, 7)
    STEP_ENTRY.pack_into(data, STEP_BYTES, 8, 3, 1, 2, 3, 4, 5, 7)  # being written
    STEP_ENTRY.pack_into(data, 2 * STEP_BYTES, 9, 3, -1, 2, 3, 4, 5, 9)

    assert [count for count, _ in read_steps(bytes(data), 0)] == [7]
    assert numpy.array([step.parts for _, step in read_steps(bytes(data), 0)]).shape == (1, len(PARTS))
