"""Where the second run of a backward does not happen, or claims nothing; what it leaves, and what is kept for it."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from pathlib import Path

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from gpuwatch.worker.record import given_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.quick_here(16)

SOURCE = Path(__file__).read_text().splitlines()


def line_of(fault):
    (line,) = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {fault}")]
    return line


class Fault(nn.Module):
    """Its backward makes nan of a row that is 0. `act` runs before, with the number of the call."""

    def __init__(self, act=None):
        super().__init__()
        self.act, self.calls = act, []

    def forward(self, x):
        self.calls.append(1)
        if self.act is not None:
            x = self.act(len(self.calls), x)
        return x + (x * x).sqrt()  # fault


class Net(nn.Module):
    def __init__(self, fault=None):
        super().__init__()
        self.enter, self.fault, self.leave = nn.Linear(4, 4, bias=False), fault or Fault(), nn.Linear(4, 2)

    def forward(self, x):
        return self.leave(self.fault(self.enter(x)))


def rows(bad=True):
    x = torch.randn(6, 4)
    x[2] *= not bad
    return x


def square(out):
    return out.square().mean()


def step(model, loss=square, x=None):
    """One step, which ends the job."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = rows() if x is None else x
    with pytest.raises(OverflowDetected):
        loss(model(x)).backward()
        optimizer.step()


def ran(watched):
    assert watched.faults == []
    (found,) = watched.of(SecondRun)
    return found


def test_it_runs_once_and_the_verdict_has_its_line(watch):
    watched, net = watch(on_overflow="abort"), Net()
    step(net)
    found = ran(watched).operation
    assert (found.line, found.module, found.node, len(net.fault.calls)) == (
        line_of("fault"),
        "fault",
        "SqrtBackward0",
        2,
    )
    verdict = watched.verdict()
    assert verdict.operation == found
    assert any("# fault" in line and "in its backward (SqrtBackward0)" in line for line in verdict.evidence)
    assert not any("--explain" in line or "explain=" in line for line in verdict.next)


@pytest.mark.parametrize("settings", [{"explain": "off", "on_overflow": "abort"}, {"on_overflow": "continue"}])
def test_it_does_not_run(watch, settings):
    watched, net = watch(**settings), Net()
    try:
        net(rows()).sum().backward()
        torch.optim.SGD(net.parameters(), 0.01).step()
    except OverflowDetected:
        assert settings["on_overflow"] == "abort"
    assert (len(net.fault.calls), watched.of(SecondRun)) == (1, [])
    assert not watched.hooks.second_runs._backward.given._of_page


def test_with_sync_it_runs_within_the_backward(watch):
    watched, net = watch(on_overflow="abort", sync=True), Net()
    step(net)
    assert ran(watched).operation.line == line_of("fault")


def test_a_backward_without_a_step(watch):
    watched = watch(on_overflow="abort")
    net = Net()
    net(rows()).sum().backward()
    assert ran(watched).operation.line == line_of("fault")


@pytest.mark.parametrize("method", ["buffers", "modules", "parameters"])
def test_a_model_whose_attribute_hides_a_method(watch, method):
    """As in megatron-core's DistributedDataParallel, which keeps a list of its buffers of gradients as `buffers`."""
    watched, net = watch(on_overflow="abort"), Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    setattr(net, method, [])
    with pytest.raises(OverflowDetected):
        net(rows()).sum().backward()
        optimizer.step()
    assert ran(watched).operation.line == line_of("fault")


def test_gradients_that_accumulate_are_added_to_once(watch):
    watched, net = watch(on_overflow="abort"), Net()
    net(rows(bad=False)).sum().backward()
    before = net.leave.weight.grad.clone()
    x = rows()
    (expected,) = torch.autograd.grad(net(x).sum(), [net.leave.weight])
    net(x).sum().backward()
    assert ran(watched).operation.line == line_of("fault")
    assert torch.equal(net.leave.weight.grad, before + expected)


class Reached(nn.Module):
    """Two outputs, one made of the other; the loss is made of both."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.kept = None

    def forward(self, x):
        h = self.enter(x)
        features = h + (h * h).sqrt()  # reached
        self.kept = features * 2
        return features, self.leave(features)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out[1].sum(),
        lambda out: out[0].sum(),
        lambda out: out[0].square().sum() + out[1].sum() * 3,
        lambda out: (out[0] * out[0].detach()).mean(),
    ],
)
def test_each_output_begins_with_what_it_was_given_from_outside(watch, loss):
    watched = watch(on_overflow="abort")
    step(Reached(), loss)
    assert ran(watched).operation.line == line_of("reached")


def test_a_loss_that_uses_what_the_model_has_not_returned(watch):
    watched, net = watch(on_overflow="abort"), Reached()
    step(net, lambda out: out[1].sum() + net.kept.sum())
    found = ran(watched)
    assert found.unknown == "the loss was made of tensors of the model that it had not returned"
    verdict = watched.verdict()
    assert verdict.operation is None
    assert any(found.unknown in line for line in verdict.evidence)


def test_a_penalty_on_a_gradient(watch):
    """The first backward is one of the model alone, whose gradients get a graph of their own."""

    def penalty(out):
        (slope,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
        return slope.square().sum()

    watched = watch(on_overflow="abort")
    x = torch.cat([torch.randn(5, 4), torch.zeros(1, 4)]).requires_grad_()
    step(Net(), penalty, x)
    assert ran(watched).operation.line == line_of("fault")


def test_a_model_that_was_called_twice_before_the_backward(watch):
    watched, net = watch(on_overflow="abort"), Net()
    with pytest.raises(OverflowDetected):
        (net(rows()).sum() + net(rows(bad=False)).sum()).backward()
        torch.optim.SGD(net.parameters(), 0.01).step()
    assert ran(watched).unknown == "the model was called again since"
    assert len(net.fault.calls) == 2


def test_two_models_in_a_row(watch):
    """The second one is handed a tensor that requires a gradient: the second run's ends there."""
    watched = watch(on_overflow="abort")
    first, second = nn.Linear(4, 4), Net()
    x = rows()
    with pytest.raises(OverflowDetected):
        h = first(x) * (x.sum(-1, keepdim=True) != 0)
        second(h).sum().backward()
        torch.optim.SGD(first.parameters(), 0.01).step()
    assert ran(watched).operation.line == line_of("fault")
    assert first.weight.grad.isnan().any()


def test_hooks_of_parameters_do_not_run_again_and_stay(watch):
    watched, net, seen = watch(on_overflow="abort"), Net(), []
    weight = net.enter.weight
    one = weight.register_hook(lambda gradient: seen.append("one"))
    weight.register_hook(lambda gradient: seen.append("two"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    step(net)
    assert ran(watched).operation is not None
    assert seen == ["one", "two", "after"]
    one.remove()
    assert list(weight._backward_hooks) == [one.id + 1]
    (weight * 1).sum().backward()
    assert seen == ["one", "two", "after", "two", "after"]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_on_the_backward_of_modules_do_not_run_again(watch, register, is_global):
    watched, net, seen = watch(on_overflow="abort"), Net(), []
    add = (
        getattr(nn.modules.module, register.replace("register_", "register_module_"))
        if is_global
        else getattr(net.leave, register)
    )
    handle = add(lambda module, *gradients: seen.append(module))
    try:
        step(net)
        once = list(seen)
        assert ran(watched).unknown == "the script has hooks on the backward of modules, which would run again"
        assert once and len(net.fault.calls) == 1
    finally:
        handle.remove()


def drawing(call, x):
    random.random()
    return x


def changing(call, x):
    return x * call


def raising(call, x):
    return [x][call - 1]


def noisy_backward(call, x):
    x = x * 1
    x.register_hook(lambda gradient: gradient * torch.rand(()))
    return x


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (drawing, "was stopped: it draws random numbers that are not known"),
        (noisy_backward, "was stopped: it draws random numbers that are not known"),
        (changing, "was stopped: the forward returned other numbers"),
        (raising, "raised IndexError"),
        (lambda call, x: x if call == 1 else x + 1e-3, "was stopped: the forward returned other numbers"),
    ],
)
def test_another_forward_than_the_first_names_nothing(watch, act, why):
    watched, net = watch(on_overflow="abort"), Net(Fault(act))
    state = random.getstate()
    step(net)
    found = ran(watched)
    assert (found.operation, found.unknown) == (None, f"a second run of the forward and its backward {why}")
    after = random.Random()
    after.setstate(state)
    if act is drawing:
        after.random()
    assert random.getstate() == after.getstate()


def test_the_same_gradient_bad_at_another_place_is_not_the_same(watch):
    """The second time another row is 0, and the outputs are as large as before."""

    def turned(call, x):
        return x if call == 1 else x.detach().flip(0) + (x - x.detach())

    watched = watch(on_overflow="abort")
    step(Net(Fault(turned)))
    found = ran(watched)
    assert found.operation is None
    assert found.unknown == "a second run of the forward and its backward did not make it again"


def test_dropout_draws_what_it_drew(watch):
    watched = watch(on_overflow="abort")
    step(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.5), Net()))
    assert ran(watched).operation.line == line_of("fault")


def test_a_buffer_that_the_result_depends_on(watch):
    class Averaged(Fault):
        def __init__(self):
            super().__init__(self.average)
            self.register_buffer("mean", torch.zeros(4))

        def average(self, call, x):
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            return x + 0 * self.mean

    watched, net = watch(on_overflow="abort"), Net(Averaged())
    step(net)
    assert ran(watched).unknown == "its call changes an input or a buffer in place"
    once = net.fault.mean.clone()
    assert torch.equal(once, net.fault.mean)
    assert len(net.fault.calls) == 2


def test_one_that_hangs_is_abandoned(watch):
    goes_on = threading.Event()

    def hangs(call, x):
        if call == 2:
            goes_on.wait()
        return x

    watched, net, seen = watch(on_overflow="abort"), Net(Fault(hangs)), []
    net.enter.weight.register_hook(seen.append)
    hooks = net.enter.weight._backward_hooks
    watched.hooks.second_runs.rerun.limit_s = 0.05
    try:
        step(net)
        assert ran(watched).unknown == "a second run of the forward and its backward took longer than 0.05 s"
        assert (net.enter.weight._backward_hooks is hooks, len(seen)) == (True, 1)
        assert not torch.is_anomaly_enabled()
    finally:
        goes_on.set()


def test_a_mode_of_the_script(watch):
    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    watched, net = watch(on_overflow="abort"), Net()
    with Seen():
        step(net)
    assert ran(watched).unknown == "the script has a mode of torch on"
    assert len(net.fault.calls) == 1


def test_a_collective_in_the_forward(watch, alone_in_a_group):
    def reduce(call, x):
        torch.distributed.all_reduce(torch.ones(1))
        return x

    watched, net = watch(on_overflow="abort"), Net(Fault(reduce))
    step(net)
    assert ran(watched).unknown.startswith("collectives ran within the call")
    assert len(net.fault.calls) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model(watch, alone_in_a_group):
    watched, net = watch(on_overflow="abort"), Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    step(net)
    assert ran(watched).unknown == "its model is sharded"
    assert len(net.fault.calls) == 1


def test_a_reentrant_checkpoint(watch):
    class Checkpointed(Net):
        def forward(self, x):
            return self.leave(checkpoint(self.fault, self.enter(x), use_reentrant=True))

    watched = watch(on_overflow="abort")
    step(Checkpointed())
    assert ran(watched).operation is None


@pytest.mark.slow
def test_compiled_code_runs_eagerly(watch):
    watched, net = watch(on_overflow="abort"), Net()
    net.fault.forward = lambda x: x + (x * x).sqrt()  # compiled
    step(torch.compile(net, backend="aot_eager"))
    (found,) = watched.of(SecondRun)
    assert (found.operation.line, found.eagerly) == (line_of("compiled"), True)
    assert net.fault.calls == []


def test_a_sum_of_gradients_has_no_line(watch):
    """Each is finite. The engine adds them, and a line that made one of them is not the maker."""

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.scale = nn.Linear(4, 4), 6e4

        def forward(self, x):
            h = self.enter(x).half()
            h = h * 1
            return (h.float() * self.scale).sum() + (h.float() * self.scale).sum()

    watched = watch(on_overflow="abort")
    step(Summed(), lambda out: out)
    assert ran(watched).unknown == "no operation that torch dispatches in the model's code made it"
    assert watched.verdict().operation is None


def test_an_input_that_is_gone(watch):
    watched, net = watch(on_overflow="abort"), Net()
    with pytest.raises(OverflowDetected):
        loss = net(rows().requires_grad_() * 1).sum()
        loss.backward()
        torch.optim.SGD(net.parameters(), 0.01).step()
    assert ran(watched).unknown == "what the model was handed was gone by then"


def test_an_input_that_was_changed(watch):
    class Shifted(Net):
        def forward(self, x, shift):
            return super().forward(x + shift)

    watched, net, shift = watch(on_overflow="abort"), Shifted(), torch.zeros(4)
    loss = net(rows(), shift).sum()
    shift.add_(1)
    loss.backward()
    assert ran(watched).unknown == "what the model was handed was changed in place since"


def test_a_weight_that_was_changed(watch):
    class Shifted(Net):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return super().forward(x) + self.shift.sum()

    watched, net = watch(on_overflow="abort"), Shifted()
    loss = net(rows()).sum()
    with torch.no_grad():
        net.shift.add_(1)
    loss.backward()
    unknown = "a second run of the forward and its backward was stopped: the forward returned other numbers"
    assert ran(watched).unknown == unknown


def test_a_gradient_is_let_go_of_when_the_backward_has_ended(watch):
    watched, net, kept = watch(on_overflow="abort"), Net(), []
    given = watched.hooks.second_runs._backward.given
    real = given.add
    given.add = lambda page, place, node, gradient: (kept.append(gradient), real(page, place, node, gradient))[1]
    out = net(rows(bad=False))
    out.square().mean().backward()
    (gradient,) = kept
    assert gradient.shape == out.shape
    gone = weakref.ref(gradient)
    kept.clear()
    del gradient
    gc.collect()
    assert gone() is None
    assert not given._of_page


def test_a_gradient_that_is_too_large_is_not_kept(watch, monkeypatch):
    monkeypatch.setattr(given_gradients, "MOST_BYTES", 8)
    watched, net = watch(on_overflow="abort"), Net()
    step(net)
    assert "was not kept" in ran(watched).unknown
    assert len(net.fault.calls) == 1


@pytest.mark.parametrize("clips", [False, True])
def test_on_a_device_whose_numbers_come_before_the_step(watch, late, clips):
    """The gradient is gone by then: those of the parameters show whether it is the same one."""
    watched, net = watch(on_overflow="abort"), Net()
    with pytest.raises(OverflowDetected):
        net(rows()).sum().backward()
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # of a norm that is nan
        watched.collect()
        torch.optim.SGD(net.parameters(), 0.01).step()
    found = ran(watched)
    assert (found.operation is None) == clips
    if clips:
        assert found.unknown == "a second run of the forward and its backward did not make it again"
    else:
        assert found.operation.line == line_of("fault")


def test_on_a_device_whose_numbers_come_after_the_step(watch, late):
    watched, net = watch(on_overflow="abort"), Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with pytest.raises(OverflowDetected):
        for _ in range(9):
            net(rows()).sum().backward()
            optimizer.step()
        watched.collect()
        net(rows())
    assert ran(watched).operation is None
