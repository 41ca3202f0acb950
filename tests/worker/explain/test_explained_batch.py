"""--explain N: the line of the forward whose backward made a bad gradient, and a training that goes on as without it.

A line whose backward makes a bad value ends in `# <name of the fault>`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.quick_here(10)

SOURCE = Path(__file__).read_text().splitlines()
BATCH = 2


def line_of(fault):
    (line,) = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {fault}")]
    return line


class Root(nn.Module):
    def forward(self, x):
        size = (x * x).sum(-1, keepdim=True)
        return x / size.sqrt().clamp(min=1e-6)  # root


class Norm(nn.Module):
    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) ** 0.5)  # norm


class Log(nn.Module):
    def forward(self, x):
        return x.abs().log().clamp(min=-9.0).exp()  # log


class Power(nn.Module):
    def forward(self, x):
        return x.abs().pow(0.3)  # power


class Divided(nn.Module):
    def forward(self, x):
        return torch.where(x == 0, x, x / x.detach().square())  # divided


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / x.abs()  # function


class Function(nn.Module):
    def forward(self, x):
        return Double.apply(x)


FAULTS = {"root": Root, "norm": Norm, "log": Log, "power": Power, "divided": Divided, "function": Function}


class Net(nn.Module):
    def __init__(self, inner, checkpointed=False):
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(4, 4, bias=False), inner, nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.a(x)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return self.b(x)


@pytest.fixture(params=["host", "late"])
def path(request):
    if request.param == "late":
        request.getfixturevalue("late")
    return request.param


def train(watched, model, batches=4, bad=BATCH):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    try:
        for batch in range(batches):
            x = torch.randn(6, 4)
            if batch == bad:
                x[3] = 0
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except OverflowDetected:
        pass
    watched.settle()
    assert watched.faults == []
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.is_anomaly_enabled()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_hooks_that_are_closed_in_the_middle_of_the_batch_leave_nothing_on(watch):
    watched = watch(explain=0)
    torch.nn.Linear(4, 2)(torch.ones(3, 4))
    assert torch._C._len_torch_dispatch_stack() == 1 and torch.is_anomaly_enabled()
    watched.close()
    assert torch._C._len_torch_dispatch_stack() == 0 and not torch.is_anomaly_enabled()


@pytest.mark.quick(12)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_line_whose_backward_made_it(watch, path, fault, checkpointed):
    watched = watch(on_overflow="abort", explain=BATCH)
    train(watched, Net(FAULTS[fault](), checkpointed))
    (ran,) = watched.of(SecondRun)
    assert ran.operation is not None, ran.unknown
    found = ran.operation
    assert (Path(found.file).name, found.line, found.module) == (Path(__file__).name, line_of(fault), "inner")
    assert found.node
    assert watched.anomalies[0].phase == "backward"
    if not checkpointed:
        verdict = watched.verdict()
        assert verdict.operation == found
        assert any(f"# {fault}" in line and "in its backward" in line for line in verdict.evidence)


def test_an_overflow_of_a_forward_is_explained_without_a_second_run(watch, path):
    class Forward(nn.Module):
        def forward(self, x):
            return (x * 1e30) * 1e30  # forward

    watched = watch(on_overflow="abort", explain=0)
    train(watched, Net(Forward()))
    (ran,) = watched.of(SecondRun)
    found = ran.operation
    assert (found.line, found.node) == (line_of("forward"), "")
    if sys.version_info >= (3, 11):
        assert found.code[slice(*found.columns)] == "(x * 1e30) * 1e30"


def test_the_line_of_a_backward_has_no_columns(watch, path):
    """autograd's notes have the line alone."""
    watched = watch(on_overflow="abort", explain=BATCH)
    train(watched, Net(Root()))
    (ran,) = watched.of(SecondRun)
    assert (ran.operation.line, ran.operation.columns) == (line_of("root"), None)
    assert ran.operation.node


@pytest.mark.quick(4)
@pytest.mark.parametrize("explain", [0, 1, BATCH, 3])
def test_a_training_has_the_same_bits(watch, path, explain):
    def net():
        torch.manual_seed(1)
        return Net(nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.2)))

    plain = train(watch(explain="off"), net(), bad=-1)
    assert all(map(torch.equal, plain, train(watch(on_overflow="abort", explain=explain), net(), bad=-1)))


@pytest.mark.parametrize("settings", [{"explain": 1}, {"explain": BATCH, "rank": 3}])
def test_another_batch_or_rank_is_not_watched(watch, settings, monkeypatch):
    """A second run of the backward finds the line."""
    watched = watch(on_overflow="abort", **settings)
    monkeypatch.setattr(watched.hooks.second_runs.explained, "operation_for", lambda bad: pytest.fail("it was watched"))
    train(watched, Net(Root()))
    (ran,) = watched.of(SecondRun)
    assert ran.operation.line == line_of("root")


def test_a_batch_that_every_would_leave_out_is_looked_at(watch):
    watched = watch(on_overflow="abort", explain=BATCH, every=100)
    train(watched, Net(Root()))
    assert watched.of(SecondRun)[0].operation.line == line_of("root")


def test_two_roots_in_one_batch(watch):
    watched = watch(on_overflow="abort", explain=0)
    first, second = nn.Linear(4, 4, bias=False), Root()
    with pytest.raises(OverflowDetected):
        second(first(torch.zeros(3, 4))).sum().backward()
        torch.optim.SGD(first.parameters(), 0.1).step()
    assert watched.of(SecondRun)[0].operation.line == line_of("root")
    watched.hooks.settle()


class Counts(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counts.seen += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_script_end_as_they_began(watch):
    watched = watch(explain=0)
    around, within = nn.Linear(4, 4), nn.Linear(4, 4)
    with Counts():  # it is on when the batch begins: nothing is put on top of it
        around(torch.randn(2, 4))
    assert torch._C._len_torch_dispatch_stack() == 0
    within(torch.randn(2, 4))  # another root, whose batch is watched
    assert torch._C._len_torch_dispatch_stack() == 1
    with Counts():
        within(torch.randn(2, 4))  # the batch ends beneath it
    before = Counts.seen
    within(torch.randn(2, 4))
    assert (Counts.seen, torch._C._len_torch_dispatch_stack()) == (before, 0)
    watched.hooks.settle()
    assert watched.faults == []


def test_the_checks_of_a_script_that_has_anomaly_mode_on_stay_on(watch):
    watched = watch(explain=0)
    model = Net(Root())
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="SqrtBackward0"):
        model(torch.zeros(3, 4)).sum().backward()
    watched.hooks.settle()
    assert not torch.is_anomaly_enabled()


# -- which elements, and the numbers of a step --------------------------------------------------------------------


def test_which_elements_of_a_gradient_are_bad(watch):
    watched = watch(on_overflow="abort")
    train(watched, Net(Root()))
    assert watched.anomalies[0].again.element == "all of row 3 (dim 0)"


def test_the_numbers_of_the_step_for_the_first_bad_element(watch):
    watched = watch(on_overflow="continue")
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
    x = torch.randn(5, 4)
    x[:, 2] = 0
    model(x).sum().backward()
    optimizer.step()
    again = watched.anomalies[0].again
    assert again.element == "all of column 2 (dim 1)"
    assert again.update == "gradient 0, step 1, exp_avg 0, exp_avg_sq 0, lr 0.001, eps 0: 0/0 at [0, 2]"
    assert f"the step for its first bad element: {again.update}" in watched.verdict().evidence


def test_of_a_sharded_weight_the_shard_is_looked_at(watch, alone_in_a_group):
    """An operation on the DTensor itself may be a collective, which no other rank issues."""
    watched = watch(on_overflow="continue")
    model = fully_shard(nn.Linear(4, 3, bias=False), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    model(torch.full((5, 4), 1e3)).sum().backward()
    optimizer.step()
    assert watched.faults == []
    again = watched.anomalies[0].again
    assert again.element == "everything of this rank's shard"
    assert again.update == "gradient 5e+03, lr 1e+38, momentum 0 at [0, 0]"


def test_which_elements_of_a_state_in_16_bits_are_bad(watch):
    watched = watch(on_overflow="continue")
    model = nn.Linear(4, 3, bias=False).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.full((1, 4), 0.5, dtype=torch.float16)
    x[0, 1] = 3e4
    model(x).sum().backward()
    optimizer.step()
    (again,) = [each.again for each in watched.anomalies if each.again is not None]
    assert math.isinf(float(optimizer.state[model.weight]["exp_avg_sq"].max()))
    assert again.element == "all of column 1 (dim 1)"
