"""Trainings whose steps are as they should be, or are for another message: no remark on steps."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.recorder.layout import HeadField
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ..small_trainings import BATCHES, LARGE, clip, net, remarks, sgd, train

pytestmark = pytest.mark.quick_here(7)


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


def two_players(model):
    """Each one's backward makes gradients of the other, which are set to zero before the other's own."""
    player = nn.Linear(8, 8)
    of_player, of_model = sgd(player), sgd(model)
    for _ in range(BATCHES):
        for optimizer, trained, sign in ((of_model, model, 1.0), (of_player, player, -1.0)):
            optimizer.zero_grad(set_to_none=False)
            (sign * model(player(torch.randn(6, 8)))).sum().backward()
            clip(trained)
            optimizer.step()


def two_optimizers(model):
    """Parts of one model, which take turns."""
    optimizers = [sgd(model[0]), sgd(model[2])]
    for batch in range(BATCHES):
        optimizer = optimizers[batch % 2]
        train(model, optimizer, batches=1)
        model.zero_grad(set_to_none=False)


def a_dead_backward(model):
    """The backward's own gradients are zero: no clip has made them so."""
    train(model, sgd(model), factor=lambda batch: 0.0)


HEALTHY = [
    *(usual, momentum, fused, warmup, frozen, left_out, one_at_a_time, accumulated, skipped, skipped_by_itself),
    *(
        saved,
        with_a_closure,
        no_step,
        no_training,
        an_image,
        a_loss_network,
        a_master_copy,
        a_dead_backward,
        two_players,
        two_optimizers,
    ),
]


@pytest.mark.quick(10)
@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.__name__)
def test_a_healthy_run_has_no_remark(watch, run):
    watched = watch()
    run(net())
    assert remarks(watched) == []


@pytest.mark.quick(3)
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
