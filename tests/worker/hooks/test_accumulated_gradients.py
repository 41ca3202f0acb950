"""The gradients of parameters that other hooks get before ours: what autograd has accumulated is what is recorded."""

from __future__ import annotations

import math
import random
import signal

import pytest
import torch
from gpuwatch.worker.hooks.accumulated_gradients import put_first
from torch import distributed as dist
from torch import nn

X = torch.ones(3, 4)


@pytest.fixture(params=["host", "late"])
def path(request):
    if request.param == "late":
        request.getfixturevalue("late")
    return request.param


def with_hook(hook) -> nn.Linear:
    model = nn.Linear(4, 2, bias=False)
    model.weight.register_post_accumulate_grad_hook(hook)
    return model


def backward(model, scale=1.0) -> None:
    model(X).sum().backward(torch.tensor(scale))


def recorded(watched) -> list[float]:
    """abs max of the weight's gradient, once for each frame of a backward that has it"""
    found = [row for frame in watched.frames("backward") for row in frame.rows if row.role == "grad weight"]
    return [row.abs_max for row in found]


def points_elsewhere(parameter) -> None:
    """As ZeRO 3: a slice of a bucket that another stream fills later."""
    parameter.grad.data = torch.full_like(parameter.grad, math.nan)


def lets_go(parameter) -> None:
    parameter.grad = None


@pytest.mark.parametrize("hook", [points_elsewhere, lets_go])
def test_a_gradient_whose_memory_is_given_away_is_recorded_as_it_was(watch, path, hook):
    watched = watch()
    backward(with_hook(hook))
    assert recorded(watched) == [3.0]
    assert watched.anomalies == watched.faults == []


def test_an_overflow_in_it_is_found_all_the_same(watch, path):
    watched = watch()
    backward(with_hook(points_elsewhere), math.inf)
    (anomaly,) = watched.anomalies
    assert (anomaly.role, anomaly.value) == ("grad output", "+inf")


def mends_in_place(parameter) -> None:
    parameter.grad.nan_to_num_(0.0, 1.0, 1.0)


def mends_a_copy(parameter) -> None:
    parameter.grad = torch.nan_to_num(parameter.grad, 0.0, 1.0, 1.0)


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


class BadWeight(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Bad.apply(self.weight))


@pytest.mark.parametrize(("hook", "rows"), [(mends_in_place, [1.0]), (mends_a_copy, [])])
def test_a_hook_may_mend_a_gradient(watch, path, hook, rows):
    """What it leaves is what is trained with: a copy is read before the step."""
    watched = watch()
    model = BadWeight(4, 2, bias=False)
    model.weight.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    assert recorded(watched) == rows
    assert watched.anomalies == watched.faults == []


def test_the_local_gradient_is_recorded_where_a_hook_reduces_it(watch, path, alone_in_a_group):
    """Nobody can tell from `.grad` whether the collective has come there: this one stands for the other ranks' nan."""

    def reduce(parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad.data.fill_(math.nan)

    watched = watch()
    backward(with_hook(reduce))
    assert recorded(watched) == [3.0]
    assert watched.anomalies == watched.faults == []


def test_a_gradient_that_was_added_to_main_grad_is_read_there(watch, path):
    watched = watch()
    model = nn.Linear(4, 2, bias=False)
    model.weight.main_grad = torch.full((2, 4), 7.0)
    model.weight.grad_added_to_main_grad = True

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            (weight,) = ctx.saved_tensors
            return None, torch.full_like(weight, math.nan)  # a placeholder, which nobody has written

    model.forward = lambda x: Fused.apply(x, model.weight)
    backward(model)
    assert recorded(watched) == [7.0]
    assert watched.anomalies == watched.faults == []


def test_a_hook_that_raises_leaves_nothing_behind(watch, path):
    def stop(parameter) -> None:
        raise ValueError("not this time")

    watched = watch()
    model = with_hook(stop)
    with pytest.raises(ValueError, match="not this time"):
        backward(model)
    model.weight.grad = None
    stopped = list(model.weight._post_accumulate_grad_hooks.items())
    for key, hook in stopped:
        if hook is stop:
            del model.weight._post_accumulate_grad_hooks[key]
    backward(model, 2.0)
    assert recorded(watched)[-1] == 6.0
    assert watched.faults == []


def test_the_hooks_of_others_keep_their_order_and_ours_come_off(watch):
    watched = watch()
    seen: list[str] = []
    model = with_hook(lambda _: seen.append("first"))
    model.weight.register_post_accumulate_grad_hook(lambda _: seen.append("second"))
    backward(model)
    assert len(model.weight._post_accumulate_grad_hooks) == 4
    watched.hooks.detach()
    assert len(model.weight._post_accumulate_grad_hooks) == 2
    backward(model)
    assert seen == ["first", "second"] * 2


def test_no_hook_is_lost_where_a_signal_comes_while_they_are_put_in_order():
    def interrupt(number, frame):
        raise InterruptedError

    weight = nn.Parameter(torch.ones(1))
    handles = [weight.register_post_accumulate_grad_hook(lambda _: None) for _ in range(3)]
    interrupted, before = 0, signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupted < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
                while True:
                    put_first(handles[interrupted % 3])
            except InterruptedError:
                interrupted += 1
            assert handles[0].hooks_dict_ref().keys() == {handle.id for handle in handles}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_torch_calls_a_hook_first_that_was_put_first():
    seen: list[str] = []
    model = with_hook(lambda _: seen.append("registered first"))
    put_first(model.weight.register_post_accumulate_grad_hook(lambda _: seen.append("put first")))
    backward(model)
    assert seen == ["put first", "registered first"]
