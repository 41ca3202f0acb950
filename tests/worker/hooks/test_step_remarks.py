"""Steps that train nothing, from a real training to the report: no gradient is left, or no weight moves."""

from __future__ import annotations

import copy

import pytest
import torch
from gpuwatch.collector.assemble.insights import find_insights
from gpuwatch.core.errors import Code
from gpuwatch.core.recorder.layout import HeadField
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

BATCHES = 20
LARGE = 3e20
"""Times this the gradients are finite in float32, and their squares are not."""


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def sgd(model: nn.Module, lr: float = 0.01, **settings) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def train(model, optimizer, *, batches=BATCHES, factor=lambda batch: 1.0, before_step=clip, dtype=torch.float32):
    for batch in range(batches):
        (model(torch.randn(6, 8, dtype=dtype)) * factor(batch)).sum().backward()
        before_step(model)
        optimizer.step()
        optimizer.zero_grad()


def remarks(watched):
    """Those on steps, after the script has ended."""
    found = find_insights(watched.facts(), 0, {})
    assert all(each.kind != "unknown" for each in found)
    return [each for each in found if each.code in (Code.GRADIENTS_ZEROED, Code.WEIGHTS_UNMOVED)]


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


# -- healthy runs -------------------------------------------------------------------------------------------------


def usual(model):
    train(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))


def momentum(model):
    train(model, sgd(model, momentum=0.9, weight_decay=0.1), before_step=lambda model: None)


def fused(model):
    train(model, torch.optim.AdamW(model.parameters(), fused=True))


def warmup(model):
    optimizer = sgd(model, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 15) / 100)
    for _ in range(BATCHES):
        train(model, optimizer, batches=1)
        schedule.step()


def frozen(model):
    model[0].requires_grad_(False)
    train(model, sgd(model))


def left_out(model):
    train(model, sgd(model[2]))


def one_at_a_time(model):
    optimizer = sgd(model)
    for batch in range(BATCHES):
        model[0].requires_grad_(batch % 2 == 0)
        train(model, optimizer, batches=1)


def accumulated(model):
    optimizer = sgd(model)
    for batch in range(BATCHES):
        model(torch.randn(6, 8)).sum().backward()
        if batch % 4 == 3:
            clip(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def skipped(model, *, backoff=0.5, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=backoff)
    for _ in range(BATCHES):
        scaler.scale(model(torch.randn(6, 8)).sum() * 10).backward()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def skipped_by_itself(model):
    skipped(model, fused=True)


def saved(model):
    """Where an optimizer has no state, torch makes one: by a step on gradients of zero."""
    optimizer = sgd(model)
    for _ in range(BATCHES):
        train(model, optimizer, batches=1, before_step=lambda model: None)
        get_optimizer_state_dict(model, optimizer)


def with_a_closure(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

    def closure():
        optimizer.zero_grad(set_to_none=False)
        loss = (model(torch.ones(6, 8)) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(BATCHES):
        optimizer.zero_grad(set_to_none=False)
        optimizer.step(closure)


def no_step(model):
    for _ in range(BATCHES):
        model(torch.randn(6, 8)).sum().backward()


def no_training(model):
    optimizer = sgd(model)
    with torch.no_grad():
        for _ in range(BATCHES):
            model(torch.randn(6, 8))
            optimizer.step()


def an_image(model):
    """The model is fixed, and its input is what is trained."""
    image = nn.Parameter(torch.randn(6, 8))
    optimizer = torch.optim.Adam([image])
    for _ in range(BATCHES):
        model(image).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def a_loss_network(model):
    """Another model makes the loss. It has gradients, and nothing trains it."""
    trained, x = nn.Linear(8, 8), torch.randn(6, 8)
    optimizer = sgd(trained)
    for _ in range(BATCHES):
        model(trained(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def a_master_copy(model):
    """The optimizer steps on a copy, which the script writes back."""
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for _ in range(BATCHES):
        model(torch.randn(6, 8)).sum().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master.data)


def a_dead_backward(model):
    """The backward's own gradients are zero: no clip has made them so."""
    train(model, sgd(model), factor=lambda batch: 0.0)


HEALTHY = [
    *(usual, momentum, fused, warmup, frozen, left_out, one_at_a_time, accumulated, skipped, skipped_by_itself),
    *(saved, with_a_closure, no_step, no_training, an_image, a_loss_network, a_master_copy, a_dead_backward),
]


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.__name__)
def test_a_healthy_run_has_no_remark(watch, run):
    watched = watch()
    run(net())
    assert remarks(watched) == []


@pytest.mark.parametrize("run", [usual, fused, frozen, accumulated, a_loss_network], ids=lambda run: run.__name__)
def test_nor_has_it_one_on_a_device(watch, late, run):
    watched = watch()
    run(net())
    assert remarks(watched) == []


def test_a_part_that_is_watched_does_not_stand_for_the_model(watch, way):
    watched, model = watch(modules=["0"]), net()
    train(
        model,
        sgd(model[2]),
        factor=lambda batch: LARGE if batch > 15 else 1.0,
        before_step=lambda model: clip(model[0]),
    )
    assert remarks(watched) == []


@pytest.mark.parametrize("settings", [{"watch": ("grads", "weights")}, {"every": 2}])
def test_what_can_be_told_of_a_run_that_is_watched_less(watch, settings):
    watched, model = watch(**settings), net()
    train(model, sgd(model), factor=lambda batch: LARGE if batch == 6 else 1.0)
    (found,) = remarks(watched)
    assert "in 1 of the " in found.text and "(batch 6)" in found.text


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_every_step(watch, way, fused):
    watched = watch(scaler_skips=1000)
    skipped(net(), backoff=0.999, fused=fused)
    watched.settle()
    assert watched.reader[HeadField.SCALER_SKIPS] == BATCHES
    assert remarks(watched) == []


def test_embeddings_of_which_few_rows_are_used(watch):
    watched = watch()
    table = nn.Embedding(1000, 4)
    optimizer = sgd(table)
    for batch in range(BATCHES):
        table(torch.tensor([1, 2, batch % 3])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert remarks(watched) == [], "its largest element is in a row that no batch has"
