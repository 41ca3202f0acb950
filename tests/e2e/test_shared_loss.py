"""A script's own collective between forward and backward: what a rank's loss was before it is the rank's own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def launched(bench, shares, bad="loss"):
    run = bench.launch("shared_loss.py", "--preflight", "off", args=("--shares", shares, "--bad", bad))
    assert run.code == 4, run.stderr
    return run.verdict


@pytest.mark.sample(2, of="a collective between forward and backward")
@pytest.mark.parametrize("shares", ["logs", "gathers", "metric"])
@pytest.mark.parametrize("bad", ["loss", "forward", "backward"])
def test_it_takes_nothing_from_the_answer(bench, shares, bad):
    verdict = launched(bench, shares, bad)
    assert (verdict["rank"], verdict["phase"], verdict["certainty"]) == (1, bad, "established"), verdict
    found = verdict["cause"] if bad != "forward" else verdict["operation"]
    assert found is not None, verdict
    assert not any("one can have brought it" in line for line in verdict["evidence"])


@pytest.mark.sample(1, of="a loss that was made from what came out")
@pytest.mark.parametrize("shares", ["in place", "mean"])
def test_where_its_result_is_the_loss_the_rank_that_put_it_in_is_named(bench, shares):
    verdict = launched(bench, shares)
    assert (verdict["rank"], verdict["phase"], verdict["certainty"]) == (1, "loss", "supported"), verdict
    assert (verdict["concurrent"], verdict["cause"] is not None) == ([], True)
    assert any("rank 1 itself put +inf into all_reduce" in line for line in verdict["evidence"])


def test_what_an_object_holds_is_not_read_and_leaves_the_doubt(bench):
    verdict = launched(bench, "objects", "own loss")
    assert (verdict["rank"], verdict["phase"], verdict["certainty"]) == (1, "loss", "supported"), verdict
    assert any("one can have brought it" in line for line in verdict["evidence"])


def test_whatever_an_object_holds_the_operation_that_made_it_of_finite_operands_is_the_answer(bench):
    verdict = launched(bench, "objects")
    assert (verdict["rank"], verdict["phase"], verdict["certainty"]) == (1, "loss", "established"), verdict
    assert (verdict["cause"]["kind"], verdict["operation"]["op"]) == ("domain", "aten.log.default")
