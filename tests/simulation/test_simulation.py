"""Jobs simulated by seed: whatever is lost, damaged or left out, none is told clean that was not read whole.

Nor is a rank named in which nothing was bad. `python -m pytest tests/simulation -m slow` runs 100,000 of them.
"""

from __future__ import annotations

import pytest
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.core.codes import Certainty, VerdictKind

from .oracle import Oracle
from .schedule import AROUND, AT_THE_START, HARMLESS, IN_A_CALL, Schedule, is_drawn
from .world import World

QUICK = 80
BLOCK = 1000
BLOCKS = 100


def against(seed: int) -> str:
    """What there is against the verdict of a seed's job; "" if nothing."""
    schedule = Schedule(seed)
    world = World(schedule)
    verdicts = world.run()
    found = [text for verdict in verdicts if (text := world.oracle.against(verdict))]
    if "ring damaged" in schedule.injected:  # a rank's memory has no checksum: a bit there may make a value look bad
        found = [text for text in found if not text.startswith("not so")]
    said = {
        # the store has of each agent its last beat alone: of what is unknown it may tell less
        (each.kind, each.certainty, each.statement if each.kind != "unknown" else "")
        for each in verdicts
    }
    if len(said) > 1:
        found.append(f"as the messages came, and of the store: {said}")
    is_sampled = any("No overflow seen: " in each.statement for each in verdicts)  # batches were skipped
    clean = ("clean", "supported" if is_sampled else "established")
    if HARMLESS.issuperset(schedule.injected) and {each[:2] for each in said} != {clean}:
        found.append(f"nothing bad happened, and it is told: {verdicts[0].statement}")
    return f"seed {seed}, {schedule.injected}: {found[0]}" if found else ""


def test_no_simulated_job_is_told_falsely_clean():
    assert [text for seed in range(QUICK) if (text := against(seed))] == []


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_job_of_a_thousand_is_told_falsely_clean(block):
    first = QUICK + block * BLOCK
    assert [text for seed in range(first, first + BLOCK) if (text := against(seed))] == []


def test_a_seed_is_always_the_same_job():
    def told(seed: int) -> list[tuple[str, list[str]]]:
        return [(verdict.statement, verdict.missing) for verdict in World(Schedule(seed)).run()]

    assert [told(seed) for seed in range(5)] == [told(seed) for seed in range(5)]


def test_everything_that_can_be_known_of_is_drawn():
    wanted = {kind for kind in (*IN_A_CALL, *AT_THE_START, *AROUND, "restart") if is_drawn(kind)}
    assert {kind for seed in range(4 * QUICK) for kind in Schedule(seed).injected} == wanted


def test_the_oracle_knows_a_false_clean():
    def against_clean(statement: str = "No overflow", **what: bool) -> str:
        oracle = Oracle()
        oracle.call(0, "rank 0").judged = True
        call = oracle.call(1, "rank 1")
        for name, value in what.items():
            setattr(call, name, value)
        return oracle.against(Verdict(VerdictKind.CLEAN, statement, Certainty.SUPPORTED))

    assert against_clean(judged=True) == ""
    assert against_clean(returned=False) == ""
    assert against_clean("only one in 2 was inspected", skipped=True) == ""
    assert "nobody has judged ['rank 1']" in against_clean()
    assert "nobody has judged" in against_clean(skipped=True)
    assert "bad values" in against_clean(judged=True, bad=True)
    assert "nothing was called" in Oracle().against(Verdict(VerdictKind.CLEAN, "", Certainty.SUPPORTED))


def test_the_oracle_knows_a_wrong_rank():
    oracle = Oracle()
    oracle.call(0, "rank 0", bad=True)
    oracle.call(1, "rank 1")

    assert oracle.against(Verdict(VerdictKind.OVERFLOW, "", Certainty.SUPPORTED, rank=0)) == ""
    assert "not so" in oracle.against(Verdict(VerdictKind.OVERFLOW, "", Certainty.SUPPORTED, rank=1))
