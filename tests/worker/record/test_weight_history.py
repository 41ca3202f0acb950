"""A weight that became bad outside of a step is told so: on the host, and on a device whose numbers come late."""

from __future__ import annotations

import math

import gpuwatch
import pytest
import torch
from torch import nn

X = torch.full((2, 4), 0.5)
SCRIPT = "the script, a load or memory changed it"


def model_of_two() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def trained(model, optimizer, handle, *, before_forward=None, before_step=None, batches=5):
    """Batch 3 has the fault."""
    for batch in range(batches):
        if batch == 3 and before_forward is not None:
            before_forward()
        model(X).sum().backward()
        if batch == 3 and before_step is not None:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
    handle._hooks.judging.finish()  # of a late device
    return handle.verdict()


def bad_copy(module, how):
    bad = torch.full_like(module.weight, math.nan)
    if how == "load":
        module.load_state_dict({"weight": bad}, strict=False)
    else:
        with torch.no_grad():
            module.weight.copy_(bad)


@pytest.mark.parametrize("how", ["load", "copy"])
def test_a_weight_that_a_load_made_bad_is_no_work_of_the_step_before(way, how):
    model = model_of_two()
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        verdict = trained(model, optimizer, handle, before_forward=lambda: bad_copy(model[1], how))
    assert (verdict.phase, verdict.module, verdict.role, verdict.batch) == ("weight", "1", "weight", 3)
    assert f"it was finite after step 3, and no optimizer step was seen in between: {SCRIPT}" in verdict.statement
    assert verdict.certainty == "supported"
    assert verdict.next[0].startswith("Look at what the script does with weights between two steps")
    assert any(
        "weight was finite when it was last read, after the step of batch 2" in line for line in verdict.evidence
    )


def test_an_update_that_the_script_makes_by_itself(way):
    model = model_of_two()
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        for batch in range(3):
            model(X).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= (math.inf if batch == 1 else 1e-3) * parameter.grad
                    parameter.grad = None
        handle._hooks.judging.finish()
        verdict = handle.verdict()
    assert (verdict.phase, verdict.module, verdict.batch) == ("weight", "0", 2)
    assert f"it was finite in batch 1, and no optimizer step was seen in between: {SCRIPT}" in verdict.statement


def test_a_weight_without_a_gradient_is_not_the_steps_work(way):
    """It is in the optimizer, whose learning rate could explain anything, and frozen."""
    model = model_of_two()
    model[1].weight.requires_grad_(False)
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        verdict = trained(model, optimizer, handle, before_step=lambda: model[1].weight.data.fill_(math.inf), batches=4)
    assert (verdict.phase, verdict.module, verdict.role, verdict.batch) == ("weight", "1", "weight", 3)
    assert "it had no gradient, and a step changes no weight without one" in verdict.statement
    assert verdict.certainty == "established"


def test_a_weight_with_a_gradient_that_its_step_made_bad(way):
    model = model_of_two()
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def wild():
            optimizer.param_groups[0]["lr"] = 3e38
            for parameter in model.parameters():
                parameter.grad.mul_(1e3)

        verdict = trained(model, optimizer, handle, before_step=wild, batches=4)
    assert (verdict.phase, verdict.module, verdict.certainty) == ("optimizer", "0", "established")
