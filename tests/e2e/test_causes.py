"""Causes that need a whole launch: the batches before, and how a script ended."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.comes_first
def test_a_training_that_diverges_is_named_with_its_optimizer(bench):
    run = bench.launch("diverging.py", "--preflight", "off")
    assert run.code == 4
    cause = run.verdict["cause"]
    assert (cause["kind"], cause["certainty"]) == ("divergence", "supported"), run.verdict
    assert "on ranks 0 and 1" in cause["statement"]
    assert "`enter` (Linear)" in cause["statement"]
    assert cause["statement"].endswith("with SGD at learning rate 7")
    assert run.verdict["next"][0].startswith("Lower the learning rate (7)")
    assert f"Cause, supported: {cause['statement']}" in " ".join((run.stdout + run.stderr).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "kind", "where"), [("one", "replica", "on rank 1 alone"), ("all", "step", "on ranks 0 and 1")]
)
def test_a_weight_that_the_script_overwrote_and_trained_on_with_is_no_training_that_diverged(bench, who, kind, where):
    run = bench.launch("overwritten.py", "--preflight", "off", args=(who,))
    assert run.code == 4
    cause = run.verdict["cause"]
    assert (cause["kind"], cause["certainty"]) == (kind, "supported"), run.verdict
    assert cause["statement"].startswith("weight of `middle` (Linear) had abs max 1.77e-01 after the step of batch 3, ")
    assert f"in the forward of batch 4, {where}: no optimizer step was seen in between" in cause["statement"]
    assert "weight of `middle` (Linear) between the step of batch 3" in run.verdict["next"][0]


@pytest.mark.slow
@pytest.mark.comes_first
def test_sys_exit_because_of_nan_names_the_variable_and_its_line(bench):
    run = bench.launch("stops_at_nan.py", "--preflight", "off")
    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (1, "crash", 1)
    cause = run.verdict["cause"]
    assert cause["kind"] == "domain", run.verdict
    assert "variable `loss` of `main` is nan" in cause["statement"]
    assert "`loss = masked(net(torch.randn(4, 8)), mask)`" in cause["statement"]
    assert "`mask` is all zero" in cause["statement"]
    assert "`div`" in run.verdict["next"][0]
