"""Pre-hooks of a script change gradients right before a step: what is read is what the step uses."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..models import tanh_net as net

X = torch.ones(3, 4)


def spoil(optimizer, *_):
    optimizer.param_groups[0]["params"][0].grad[0, 0] = float("inf")


def repair(optimizer, *_):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


@pytest.fixture(params=["the optimizer's own", "global"])
def register(request):
    """Registers a pre-hook, which is gone after the test."""
    handles = []

    def registered(optimizer, hook):
        own = request.param != "global"
        handles.append(optimizer.register_step_pre_hook(hook) if own else register_optimizer_step_pre_hook(hook))

    yield registered
    for handle in handles:
        handle.remove()


def stepped(model, optimizer):
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("way")
def test_a_gradient_that_one_makes_bad_is_the_anomaly(watch, register):
    watched = watch(on_overflow="abort")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register(optimizer, spoil)
    with pytest.raises(OverflowDetected):
        for _ in range(3):  # the numbers of a device are there some batches later
            stepped(model, optimizer)
    (anomaly,) = watched.anomalies
    assert (anomaly.module, anomaly.role, anomaly.phase, anomaly.value) == ("0", "grad weight", "collective", "+inf")
    assert anomaly.where.batch == 0


@pytest.mark.usefixtures("way")
def test_one_that_is_repaired_is_none(watch, register):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register(optimizer, repair)
    for _ in range(3):
        model(X).sum().backward()
        spoil(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert watched.anomalies == watched.faults == []
    assert watched.reader.state().step == 3


def test_the_guard_decides_by_what_the_step_would_use(watch, register):
    watched = watch(guard_optimizer=True, on_overflow="continue", watch=("forward",))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    register(optimizer, lambda *given: (spoil if watched.reader.state().step == 0 else repair)(*given))
    stepped(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert len(watched.anomalies) == 1
    model(X).sum().backward()
    spoil(optimizer)
    optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert len(watched.anomalies) == 1
    assert watched.faults == []


def test_the_scripts_hooks_keep_their_order_and_their_tables(watch):
    watched = watch(on_overflow="abort")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("first"))
    stepped(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: called.append("second"))
    stepped(model, optimizer)
    last = optimizer.register_step_pre_hook(lambda optimizer, *_: spoil(optimizer) or called.append("third"))
    assert len(optimizer._optimizer_step_pre_hooks) == 3
    with pytest.raises(OverflowDetected):
        stepped(model, optimizer)
    assert called == ["first", "first", "second", "first", "second", "third"]
    last.remove()
    optimizer.zero_grad()
    stepped(model, optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 2
    assert [anomaly.phase for anomaly in watched.anomalies] == ["collective"]


def test_nothing_is_left_when_a_hook_raises_and_the_watch_ends(watch):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refuse(*_):
        raise ValueError("the script's own")

    handle = optimizer.register_step_pre_hook(refuse)
    model(X).sum().backward()
    for _ in range(3):
        with pytest.raises(ValueError, match="the script's own"):
            optimizer.step()
        assert len(optimizer._optimizer_step_pre_hooks) == 2
    watched.hooks.detach()
    assert list(optimizer._optimizer_step_pre_hooks) == [handle.id]
    assert watched.faults == []


def test_a_step_within_a_step(watch):
    """As ZeroRedundancyOptimizer's, which calls that of the optimizer of this rank's share."""
    watched = watch(on_overflow="abort")
    model = net()

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step()

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = Outer(model.parameters(), lr=0.1)
    for each in (inner, outer):
        each.register_step_pre_hook(lambda *_: None)
    stepped(model, outer)
    inner.register_step_pre_hook(spoil)
    with pytest.raises(OverflowDetected):
        stepped(model, outer)
    assert [anomaly.role for anomaly in watched.anomalies] == ["grad weight"]


def test_a_closure_that_a_hook_puts_in_is_guarded(watch):
    watched = watch(guard_optimizer=True, on_overflow="abort")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = model(X).sum()
        loss.backward()
        spoil(optimizer)
        return loss

    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, closure), kwargs))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OverflowDetected):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert watched.faults == []
