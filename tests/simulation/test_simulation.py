"""Jobs simulated by seed: whatever is lost, damaged or left out, none is told clean that was not looked at to its end."""

from __future__ import annotations

import pytest

from .schedule import Schedule
from .world import World

QUICK = 250
BLOCK = 1000
BLOCKS = 100


def against(seed: int, only: tuple[str, ...] = ()) -> str:
    """What the oracle has against the verdict of a seed's job; "" if nothing."""
    schedule = Schedule(seed, only)
    world = World(schedule)
    verdicts = world.run()
    found = [text for verdict in verdicts if (text := world.oracle.against(verdict))]
    if not schedule.injected and {(each.kind, each.certainty) for each in verdicts} != {("clean", "established")}:
        found.append(f"nothing went wrong, and it is told: {verdicts[0].statement}")
    return f"seed {seed}, {schedule.injected}: {found[0]}" if found else ""


def test_no_simulated_job_is_told_falsely_clean():
    assert [text for seed in range(QUICK) if (text := against(seed))] == []


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_job_of_a_thousand_is_told_falsely_clean(block):
    first = QUICK + block * BLOCK
    assert [text for seed in range(first, first + BLOCK) if (text := against(seed))] == []
