"""The loss of each backward: a frame of one number, on the host and on a device whose numbers come late."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarms import RangeWarning
from gpuwatch.core.frames import RowMark
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ..models import Multiplies
from ..models import tanh_net as net

pytestmark = pytest.mark.quick_here(28)

X = torch.ones(3, 4)
ZERO = torch.zeros(())


@pytest.fixture(autouse=True)
def anywhere(way):
    """Each test runs on the host, with the native writer and without, and on a late device."""


def losses(watched):
    """abs max of each row of a loss, in the order of pages."""
    frames = [frame for page in watched.pages for frame in page.frames if frame.phase == "loss"]
    return [pytest.approx(row.abs_max) for frame in frames for row in frame.rows]


def alarms(watched):
    watched.settle()
    assert watched.faults == []
    return [(alarm.phase, alarm.module, alarm.value, alarm.where.batch) for alarm in watched.anomalies]


def test_the_loss_is_a_frame_between_the_forward_and_the_gradients(watch):
    watched = watch()
    loss = net()(X).square().mean()
    loss.backward()
    (frame,) = watched.frames("loss")
    assert (frame.title, frame.depth, frame.parent) == ("(loss) backward", 0, None)
    assert [(row.role, row.abs_max, row.dtype, row.shape) for row in frame.rows] == [
        ("output", loss.item(), "float32", [])
    ]
    phases = [each.phase for each in watched.last.frames]
    assert phases.index("loss") == phases.index("backward") - 1
    assert alarms(watched) == []


# -- what is bad --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "value"),
    [(lambda: torch.log(ZERO), "-inf"), (lambda: -torch.log(ZERO), "+inf"), (lambda: math.inf * ZERO, "nan")],
    ids=["-inf", "+inf", "nan"],
)
def test_a_term_without_a_gradient_is_an_alarm_though_all_gradients_are_finite(watch, term, value):
    watched = watch()
    model = net()
    model(X).mean().backward()
    model.zero_grad()
    (model(X).mean() + term()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert alarms(watched) == [("loss", "(loss)", value, 1)]


def test_what_a_module_returned_comes_first(watch):
    watched = watch()
    model = nn.Sequential(net(), Multiplies())
    model(X).sum().backward()
    assert [alarm[:2] for alarm in alarms(watched)] == [("forward", "1")]


def test_the_loss_comes_before_its_gradients(watch):
    watched = watch()
    (net()(X).sum() * math.inf).backward()
    assert [alarm[:2] for alarm in alarms(watched)] == [("loss", "(loss)")]
    assert any(not row.finite for frame in watched.frames("backward") for row in frame.rows)


def test_a_rule_waives_it(watch):
    watched = watch(ignore=["(loss)"])
    (net()(X).sum() + torch.log(ZERO)).backward()
    assert alarms(watched) == []


def test_sync_ends_the_backward_itself(watch, way):
    watched = watch(sync=True, on_overflow="abort")
    model = net()
    with pytest.raises(OverflowDetected, match="rank 0: -inf in the loss, after the forward of batch 0"):
        (model(X).sum() + torch.log(ZERO)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [alarm.phase for alarm in watched.anomalies] == ["loss"]


def test_the_job_ends_before_the_step(watch, way):
    watched = watch(on_overflow="abort")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    (model(X).sum() + torch.log(ZERO)).backward()
    if way == "late":
        watched.settle()
    with pytest.raises(OverflowDetected, match="-inf in the loss"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def scaled_by_hand(out, scale=1024.0):
    return (out.sum().half() + 70) * scale


def test_a_scale_of_the_scripts_own_may_make_it_inf_in_float16(watch, way):
    """70 * 1024 is inf in float16, and the gradients that the script trains with are made of 1024 alone."""
    watched = watch(on_overflow="abort")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(2):
        scaled_by_hand(model(X)).backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
    assert losses(watched) == [math.inf, math.inf]
    assert alarms(watched) == []
    (warned,) = watched.of(RangeWarning)
    assert (warned.kind, warned.phase, warned.module, warned.abs_max) == ("near overflow", "loss", "(loss)", math.inf)


def test_its_gradients_are_an_alarm_if_they_are_inf(watch):
    watched = watch()
    scaled_by_hand(net()(X), scale=torch.tensor(math.inf, dtype=torch.float16)).backward()
    assert [alarm[0] for alarm in alarms(watched)] == ["backward"]


def test_nan_in_float16_is_an_alarm(watch):
    watched = watch()
    ((net()(X).sum().half() + 70) * 1024 + math.inf * ZERO.half()).backward()
    assert [alarm[:3] for alarm in alarms(watched)] == [("loss", "(loss)", "nan")]


# -- what is a loss -----------------------------------------------------------------------------------------------


def test_each_backward_of_a_batch_has_its_own(watch):
    watched = watch()
    maker, judge = net(), nn.Linear(2, 1)
    fake = maker(X)
    judge(fake.detach()).mean().mul(3.0).backward()
    second = judge(fake).mean().mul(5.0)
    second.backward()
    assert len(losses(watched)) == 2
    assert losses(watched)[1] == abs(second.item())
    assert alarms(watched) == []


def test_a_loss_of_several_roots_is_read_once(watch):
    watched = watch()
    one, two = net(), nn.Linear(4, 2)
    (one(X) * two(X)).sum().backward()
    assert len(losses(watched)) == 1


def test_accumulation_and_a_graph_that_is_kept(watch):
    watched = watch()
    model = net()
    for _ in range(2):
        loss = model(X).sum() / 2
        loss.backward(retain_graph=True)
    loss.backward()
    assert losses(watched) == [abs(loss.item())] * 3


def test_several_tensors_of_one_backward(watch):
    watched = watch()
    out = net()(X)
    torch.autograd.backward([out.sum(), out.mean() + torch.log(ZERO)])
    (frame,) = watched.frames("loss")
    assert [(row.role, row.finite) for row in frame.rows] == [("output[0]", True), ("output[1]", False)]
    assert alarms(watched) == [("loss", "(loss)", "-inf", 0)]


def test_a_tensor_of_several_elements_is_none(watch):
    watched = watch()
    out = net()(X) + torch.log(ZERO)
    out.backward(torch.ones(3, 2))
    assert losses(watched) == []
    assert alarms(watched) == []


def test_one_element_in_any_shape_is_one(watch):
    watched = watch()
    net()(X).sum().reshape(1, 1).backward()
    assert len(losses(watched)) == 1


def test_a_derivative_alone_is_none(watch):
    """`torch.autograd.grad` of a sum that overflows: scripts use the gradient, and never the sum."""
    watched = watch()
    x = X.clone().requires_grad_()
    out = net()(x)
    (slope,) = torch.autograd.grad(out.sum() + torch.log(ZERO), x, create_graph=True)
    penalty = slope.square().sum()
    assert losses(watched) == []
    (out.mean() + penalty).backward()
    assert len(losses(watched)) == 1
    assert alarms(watched) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_inner_backward_of_a_checkpoint_is_none(watch, reentrant):
    class Stretches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 1), nn.Linear(1, 1)

        def forward(self, x):
            x = checkpoint(self.one, x, use_reentrant=reentrant)
            return checkpoint(self.two, x, use_reentrant=reentrant)

    watched = watch()
    x = torch.ones(1, 4, requires_grad=True)  # what each stretch returns has one element
    loss = Stretches()(x).sum() * 3
    loss.backward()
    assert losses(watched) == [abs(loss.item())]


def test_a_backward_that_reaches_no_module_has_a_row_if_its_loss_is_bad(watch, way):
    """On a device nobody knows by then that it is."""
    watched = watch()
    weight = torch.ones(2, requires_grad=True)
    net()(X)
    weight.sum().backward()
    assert losses(watched) == []
    (weight.sum() + torch.log(ZERO)).backward()
    assert alarms(watched) == ([("loss", "(loss)", "-inf", 0)] if way != "late" else [])


def test_a_loss_where_no_module_is_called_is_counted_in_backwards(watch, way):
    watched = watch(on_overflow="abort")
    weight = torch.ones(2, requires_grad=True)
    for _ in range(3):
        weight.sum().backward()
    loss = (weight * 0).log().sum()
    if way == "late":
        loss.backward()
    else:
        with pytest.raises(OverflowDetected, match=r"rank 0: -inf in the loss, backward 3; aten\.log\.default made it"):
            loss.backward()
    assert weight.grad.tolist() != [3, 3]  # the backward itself has run
    assert alarms(watched) == ([("loss", "(loss)", "-inf", 3)] if way != "late" else [])


@pytest.mark.parametrize("kind", [TorchFunctionMode, TorchDispatchMode])
def test_a_mode_of_the_script_does_not_see_that_a_loss_is_read(watch, way, kind):
    watch()
    seen = []

    class Counter(kind):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        __torch_dispatch__ = __torch_function__

    weight = torch.zeros(2, requires_grad=True)
    bad = [weight.log().sum() for _ in range(2)]
    with Counter():
        bad[0].backward()
        with_watch = len(seen)
        assert not [name for name in seen if "item" in name or "local_scalar" in name]
    seen.clear()
    weight.grad = None
    gpuwatch_is_off = torch.autograd.backward.__globals__["_engine_run_backward"]
    torch.autograd.backward.__globals__["_engine_run_backward"] = torch.autograd.graph._engine_run_backward
    try:
        with Counter():
            bad[1].backward()
    finally:
        torch.autograd.backward.__globals__["_engine_run_backward"] = gpuwatch_is_off
    assert len(seen) == with_watch


def test_a_loss_without_a_graph_is_recorded_alone(watch, way):
    watched = watch()
    torch.tensor(math.inf, requires_grad=True).backward()
    assert alarms(watched) == ([("loss", "(loss)", "+inf", 0)] if way != "late" else [])


def test_torch_autograd_grad_is_no_loss(watch):
    watched = watch(on_overflow="abort")
    weight = torch.zeros(2, requires_grad=True)
    torch.autograd.grad(weight.log().sum(), weight)
    assert alarms(watched) == []


@pytest.mark.parametrize("raises", [RuntimeError, KeyboardInterrupt])
def test_what_the_script_raises_within_its_backward_is_its_own(watch, raises):
    watched = watch(on_overflow="abort")
    weight = torch.zeros(2, requires_grad=True)

    def fails(gradient):
        raise raises("the script's own")

    weight.register_hook(fails)
    with pytest.raises(raises, match="the script's own"):
        weight.log().sum().backward()
    assert watched.faults == []


def test_compiled_code(watch):
    watched = watch()
    model = torch.compile(net(), backend="eager")
    model(X).sum().backward()
    (model(X).sum() + torch.log(ZERO)).backward()
    assert len(losses(watched)) == 2
    assert alarms(watched) == [("loss", "(loss)", "-inf", 1)]


# -- a GradScaler's -----------------------------------------------------------------------------------------------


def train(make_loss, steps=2, scale=1024.0) -> nn.Module:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=scale)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(make_loss(model(X))).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def test_a_scaled_loss_that_overflows_is_the_scalers_case(watch):
    """In float16 the loss times its scale is inf, and its gradient, the scale, is: the step is skipped."""
    watched = watch(on_overflow="abort")
    train(lambda out: out.sum().reshape(1).half() + 3, scale=2.0**17)
    assert losses(watched)[0] == math.inf
    assert {row.mark for frame in watched.frames("loss", page=0) for row in frame.rows} == {RowMark.SCALED}
    assert alarms(watched) == []


def test_a_scaled_loss_of_float16_may_overflow_alone(watch):
    """100 * 1024 is inf in float16, and its gradient, 1024, is not: the training has no harm."""
    watched = watch(on_overflow="abort")
    model = train(lambda out: out.sum().reshape(1).half() * 0 + 100)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert losses(watched) == [math.inf, math.inf]
    assert alarms(watched) == []


def test_a_scaled_loss_that_no_scale_made_bad(watch):
    watched = watch()
    train(lambda out: out.sum() + torch.log(ZERO), steps=2)
    assert alarms(watched) == [("loss", "(loss)", "-inf", 0), ("loss", "(loss)", "-inf", 1)]


# -- harmless -----------------------------------------------------------------------------------------------------


def test_it_is_not_kept_alive(watch):
    watched = watch()
    loss = net()(X).sum()
    gone = weakref.ref(loss)
    loss.backward()
    del loss
    gc.collect()
    assert gone() is None
    assert len(losses(watched)) == 1


def test_no_mode_of_the_script_sees_the_reading(watch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def operations() -> list[str]:
        model = net()
        with Counts() as counts:
            model(X).sum().backward()
        return counts.names

    plain = operations()
    watch()
    assert operations() == plain


class _WithTemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.fc(x)


def test_the_loss_is_known_where_a_parameter_that_it_uses_itself_has_the_first_bad_gradient(watch):
    watched = watch(on_overflow="abort")
    model = _WithTemperature()
    loss = (model(torch.ones(2, 3)) / torch.zeros(2, 3)).abs().sum() * model.temperature.exp()
    loss.backward()
    alarm, is_late = watched.anomalies[0], watched.hooks.frames.rows.device_buffer is not None
    assert (alarm.module, alarm.role) == ("", "grad temperature")
    assert [told.value for told in alarm.again.losses] == ["+inf"]
    assert [told.name for told in alarm.again.script if told.counts] == ([] if is_late else ["loss"])
