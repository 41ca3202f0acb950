"""Steps that train nothing, from a real training to the report: no gradient is left, or no weight moves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ..small_trainings import BATCHES, LARGE, clip, net, remarks, sgd, train

pytestmark = pytest.mark.quick_here(8)

# -- every gradient is zero ---------------------------------------------------------------------------------------


def test_a_clip_by_a_norm_that_is_inf_is_told_with_its_cause(watch, way):
    watched, model = watch(), net()
    train(model, torch.optim.AdamW(model.parameters()), factor=lambda batch: LARGE)
    (found,) = remarks(watched)
    assert (found.kind, found.code, found.ranks, found.since) == ("gradients_zeroed", "GW211", [0], 0)
    assert found.text == (
        "every gradient that the optimizer got was zero on rank 0 in 20 of the 20 batches that were read (batch 0 the "
        "first, batch 19 the last), while those that the backward had made were finite, up to 1.80e+21 in grad bias of "
        "`2` (Linear): their norm is inf in float32, and a clip by a norm that is inf sets all gradients to 0"
    )
    assert "in float64" in found.next and "error_if_nonfinite=True" in found.next


def test_some_batches_are_counted(watch, way):
    watched, model = watch(), net()
    train(model, sgd(model), factor=lambda batch: LARGE if batch in (5, 7) else 1.0)
    (found,) = remarks(watched)
    assert found.since == 5
    assert "in 2 of the 20 batches that were read (batch 5 the first, batch 7 the last)" in found.text


def test_a_norm_in_float16(watch):
    watched, model = watch(), net(torch.float16)
    train(model, sgd(model), factor=lambda batch: 8000.0 if batch == 9 else 1e-3, dtype=torch.float16)
    (found,) = remarks(watched)
    assert "in 1 of the 20 batches that were read (batch 9)" in found.text
    assert "up to 4.80e+04 in grad bias of `2`" in found.text and "their norm is inf in float16" in found.text
    assert "in float32" in found.next


def test_gradients_that_the_script_sets_to_zero_have_no_norm_to_blame(watch, way):
    watched, model = watch(), net()
    train(model, sgd(model), before_step=lambda model: model.zero_grad(set_to_none=False))
    (found,) = remarks(watched)
    assert found.text.endswith("up to 6.00e+00 in grad bias of `2` (Linear)")
    assert "`zero_grad()`" in found.next


def test_after_several_backwards(watch):
    watched, model = watch(), net()
    optimizer = sgd(model)
    for batch in range(BATCHES):
        (model(torch.randn(6, 8)) * LARGE).sum().backward()
        if batch % 4 == 3:
            clip(model)
            optimizer.step()
            optimizer.zero_grad()
    (found,) = remarks(watched)
    assert "in 5 of the 5 batches that were read (batch 3 the first, batch 19 the last)" in found.text


def test_the_numbers_of_a_scaled_backward_say_nothing_of_the_norm(watch):
    watched, model, scaler = watch(), net(), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = sgd(model)
    for _ in range(BATCHES):
        scaler.scale((model(torch.randn(6, 8)) * LARGE).sum()).backward()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    (found,) = remarks(watched)
    assert found.kind == "gradients_zeroed" and "norm" not in found.text


def test_only_what_the_optimizer_has_counts(watch):
    watched, model = watch(), net()
    train(model, sgd(model[2]), factor=lambda batch: LARGE, before_step=lambda model: clip(model[2]))
    (found,) = remarks(watched)
    assert found.kind == "gradients_zeroed" and "in 20 of the 20 batches" in found.text


def test_one_gradient_that_is_left_is_enough(watch, way):
    watched, model = watch(), net()
    train(model, sgd(model), factor=lambda batch: LARGE, before_step=lambda model: clip(model[0]))
    assert remarks(watched) == []


def test_a_gradient_of_an_earlier_backward_is_left_too(watch, way):
    """The step's page shows no gradient of a module that only an earlier micro-batch has used."""
    watched, model = watch(), nn.ModuleDict({"even": nn.Linear(8, 4), "odd": nn.Linear(8, 4)})
    model.forward = lambda which: model[which](torch.randn(6, 8)).sum() * LARGE
    optimizer = sgd(model)
    for _ in range(BATCHES):
        for which in ("even", "odd"):
            model(which).backward()
        clip(model["odd"])
        optimizer.step()
        optimizer.zero_grad()
    assert remarks(watched) == []


def test_what_is_not_finite_is_for_the_verdict(watch, way):
    watched, model = watch(), net()
    train(
        model,
        sgd(model),
        factor=lambda batch: float("inf") if batch == 5 else 1.0,
        before_step=lambda model: model[2].bias.grad.isfinite().all() or model.zero_grad(set_to_none=False),
    )
    assert watched.anomalies
    assert remarks(watched) == []


@pytest.mark.parametrize("settings", [{"watch": ("grads", "weights")}, {"every": 2}])
def test_what_can_be_told_of_a_run_that_is_watched_less(watch, settings):
    watched, model = watch(**settings), net()
    train(model, sgd(model), factor=lambda batch: LARGE if batch == 6 else 1.0)
    (found,) = remarks(watched)
    assert "in 1 of the " in found.text and "(batch 6)" in found.text


# -- no weight moves ----------------------------------------------------------------------------------------------


def test_an_optimizer_that_has_the_parameters_of_a_copy(watch, way):
    watched, model = watch(), net()
    train(model, torch.optim.AdamW(copy.deepcopy(model).parameters()), before_step=lambda model: None)
    (found,) = remarks(watched)
    assert (found.kind, found.code, found.ranks, found.since) == ("weights_unmoved", "GW212", [0], 0)
    assert found.text.startswith(
        "the weights of Sequential look unmoved on rank 0: abs max and abs min of all 4 weights"
    )
    assert "the same after each of 19 steps (up to 3.53e-01 in weight of `0` (Linear))" in found.text
    assert found.text.endswith("; the optimizer that steps has none of them")


def test_a_learning_rate_of_zero(watch, way):
    watched, model = watch(), net()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    (found,) = remarks(watched)
    assert found.kind == "weights_unmoved" and "learning rate" in found.next
    assert "has none of them" not in found.text


def test_a_step_too_small_for_the_dtype(watch):
    watched, model = watch(), net(torch.bfloat16)
    train(model, sgd(model, 1e-9), dtype=torch.bfloat16)
    (found,) = remarks(watched)
    assert found.kind == "weights_unmoved"


def test_a_few_steps_may_be_the_beginning_of_a_warmup(watch):
    watched, model = watch(), net()
    train(model, sgd(model, 0.0), batches=12)
    assert remarks(watched) == []


def test_a_copy_in_float32_moves_before_the_weights_in_16_bits_do(watch):
    watched, model = watch(), net(torch.bfloat16)
    train(model, sgd(copy.deepcopy(model).float()), dtype=torch.bfloat16, before_step=lambda model: None)
    assert remarks(watched) == []
