"""GradScalers: inf in the gradients of a skipped step is expected, until it never ends."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarms import ScalerSkip
from gpuwatch.core.frames import RowMark
from gpuwatch.core.recorder.layout import HeadField
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..models import tanh_net as net

X = torch.ones(3, 4)
METHODS = ("__init__", "scale", "step", "update")


class Times(torch.autograd.Function):
    """Multiplies the gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def train(scaler, optimizer, model, factors, clip=False) -> None:
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale(Times.apply(model(X), factor).sum()).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


INF = math.inf
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_skipped_steps_are_counted_and_no_alarm(watch, make, clip):
    watched = watch(on_overflow="abort")
    model = net()
    scaler = GradScaler("cpu", init_scale=1024.0)
    train(scaler, make(model.parameters()), model, [1, INF, INF, 1, INF], clip)
    skips = watched.of(ScalerSkip)
    assert [(s.scale, s.in_a_row, s.where.batch) for s in skips] == [(1024, 1, 1), (512, 2, 2), (256, 1, 4)]
    assert {(s.module, s.cls, s.role, s.value) for s in skips} == {("2", "Linear", "grad output", "+inf")} or {
        s.module for s in skips
    } == {"2"}
    assert watched.reader[HeadField.SCALER_SKIPS] == 3
    assert watched.anomalies == watched.faults == []
    assert all(p.isfinite().all() for p in model.parameters())


def test_rows_of_such_a_backward_are_marked(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    train(scaler, optimizer, model, [INF])
    rows = [row for frame in watched.frames("backward") for row in frame.rows]
    assert rows
    assert {row.mark for row in rows} == {RowMark.SCALED}
    model(X).sum().backward()  # without the scaler
    assert {row.mark for frame in watched.frames("backward") for row in frame.rows} == {0}


def test_a_bad_gradient_without_the_scaler_is_an_alarm_again(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(GradScaler("cpu"), optimizer, model, [1, INF])
    Times.apply(model(X), INF).sum().backward()
    assert [(a.where.batch, a.phase) for a in watched.anomalies] == [(2, "backward")]


def test_an_overflow_of_the_forward_is_an_alarm_with_a_scaler_too(watch):
    watched = watch()
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(3e38)
    train(GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1), model, [1])
    assert [(a.phase, a.role) for a in watched.anomalies] == [("forward", "output")]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_too_many_skips_in_a_row_are_an_alarm(watch, make):
    watched = watch(on_overflow="abort", scaler_skips=3)
    model = net()
    scaler = GradScaler("cpu", init_scale=2.0**20)
    optimizer = make(model.parameters())
    train(scaler, optimizer, model, [INF, INF, 1, INF, INF])
    with pytest.raises(OverflowDetected, match=r"\(GradScaler skipped 3 steps in a row, the last at scale 65536\)"):
        train(scaler, optimizer, model, [INF])
    (anomaly,) = watched.anomalies
    assert (anomaly.where.batch, anomaly.cause[:10]) == (5, "GradScaler")
    assert (anomaly.module, anomaly.phase) == ("2", "backward")


def test_a_scale_that_has_collapsed_is_an_alarm(watch):
    watched = watch()
    model = net()
    train(GradScaler("cpu", init_scale=1.0), torch.optim.SGD(model.parameters(), lr=0.1), model, [INF, INF])
    assert [(a.where.batch, a.cause) for a in watched.anomalies] == [
        (1, "GradScaler skipped 2 steps in a row, the last at scale 0.5")
    ]


def test_steps_are_counted_for_each_optimizer(watch):
    """One half of a model that never overflows must not hide the other that always does."""
    watched = watch(scaler_skips=3)
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = GradScaler("cpu", init_scale=2.0**20)
    for _ in range(4):
        for model, optimizer, factor in zip(models, optimizers, (INF, 1), strict=True):
            optimizer.zero_grad()
            scaler.scale(Times.apply(model(X), factor).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert [s.in_a_row for s in watched.of(ScalerSkip)] == [1, 2, 3, 4]
    assert [a.where.batch for a in watched.anomalies] == [2, 3]


def test_another_optimizer_with_the_id_of_one_that_is_gone_begins_anew(watch):
    watched = watch()
    model, kept = net(), watched.hooks._scalers._in_a_row
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    train(GradScaler("cpu", init_scale=2.0**20), first, model, [INF])
    # Python may give the second one the address of the first, which is its id
    kept[id(second)] = kept.pop(id(first))
    del first
    train(GradScaler("cpu", init_scale=2.0**20), second, model, [INF])
    assert [skip.in_a_row for skip in watched.of(ScalerSkip)] == [1, 1]
    assert watched.faults == []


def test_the_step_that_is_skipped_is_not_a_step(watch):
    watched = watch()
    model = net()
    train(GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1), model, [1, INF, 1])
    assert watched.reader[HeadField.STEP] == 2
    assert watched.rows("optimizer", page=1) == []


def test_with_grads_accumulated_under_a_scaler(watch):
    watched = watch(on_overflow="abort")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    for factor in (INF, 1):
        scaler.scale(Times.apply(model(X), factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    (skip,) = watched.of(ScalerSkip)
    assert (skip.where.batch, skip.in_a_row) == (0, 1), "the batch that it came from"
    assert watched.anomalies == watched.faults == []


def test_a_gradient_that_no_hook_saw_is_found_when_the_step_is_skipped(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    model[0].bias.grad.fill_(INF)
    scaler.step(optimizer)
    scaler.update()
    (skip,) = watched.of(ScalerSkip)
    assert (skip.module, skip.role, skip.value) == ("0", "grad bias", "+inf")
    assert watched.anomalies == []


def test_a_scaler_that_is_switched_off_changes_nothing(watch):
    watched = watch()
    model = net()
    train(GradScaler("cpu", enabled=False), torch.optim.SGD(model.parameters(), lr=0.1), model, [INF])
    assert [a.phase for a in watched.anomalies] == ["backward"]
    assert watched.of(ScalerSkip) == []


def test_a_class_with_methods_of_its_own_is_known_even_if_it_comes_later(watch):
    """FSDP's ShardedGradScaler is such a class."""

    class Early(GradScaler):
        def scale(self, outputs):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return outputs * self._scale

    watched = watch(on_overflow="abort")

    class Late(Early):
        def scale(self, outputs):
            return super().scale(outputs)

    before = {cls: dict(vars(cls)) for cls in (Early, Late)}
    for cls in (Early, Late):
        model = net()
        train(cls("cpu"), torch.optim.SGD(model.parameters(), lr=0.1), model, [1, INF])
    assert len(watched.of(ScalerSkip)) == 2
    assert watched.anomalies == watched.faults == []
    watched.hooks.detach()
    assert "scale" in before[Late]
    assert vars(Late)["scale"] is before[Late]["scale"]


def test_the_same_bits_with_a_scaler(watch):
    def run() -> list[torch.Tensor]:
        model = net()
        scaler = GradScaler("cpu", growth_interval=2)
        train(scaler, torch.optim.AdamW(model.parameters(), lr=0.1), model, [1, INF, 1, 1, 1], clip=True)
        return [torch.tensor(scaler.get_scale()), *model.parameters()]

    plain = run()
    watch()
    assert all(torch.equal(left, right) for left, right in zip(run(), plain, strict=True))


def test_the_methods_are_put_back_however_many_have_watched(watch):
    plain = {name: vars(GradScaler)[name] for name in METHODS}
    first, second = watch(), watch()
    assert all(vars(GradScaler)[name] is not plain[name] for name in METHODS)
    assert vars(GradScaler)["scale"].__name__ == "scale"
    model = net()
    train(GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1), model, [INF])
    assert len(first.of(ScalerSkip)) == len(second.of(ScalerSkip)) == 1
    first.hooks.detach()  # not in the reverse order
    train(GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1), model, [INF])
    assert len(first.of(ScalerSkip)) == 1
    assert len(second.of(ScalerSkip)) == 2
    second.hooks.detach()
    second.hooks.detach()
    assert {name: vars(GradScaler)[name] for name in METHODS} == plain


def test_a_scaler_can_be_pickled_and_saved_while_it_is_watched(watch):
    import pickle

    watch()
    scaler = GradScaler("cpu")
    model = net()
    train(scaler, torch.optim.SGD(model.parameters(), lr=0.1), model, [1])
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == scaler.get_scale()
    assert scaler.state_dict()["scale"] == 65536


@pytest.mark.parametrize("enabled", [True, False])
def test_the_scale_stands_beside_an_alarm(watch, enabled):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**100, enabled=enabled)
    scaler.scale(Times.apply(model(X), 1e30).sum()).backward()
    with torch.no_grad():
        model[0].weight.grad.fill_(INF)  # what a step without the scaler would use
    optimizer.step()
    first = watched.anomalies[0]
    assert first.again.loss_scale == (2.0**100 if enabled else None)
    assert watched.faults == []
