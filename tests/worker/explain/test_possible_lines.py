"""The lines that may have made a value, where its numbers arrive after the optimizer's step."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from torch import nn

pytestmark = pytest.mark.quick_here(6)


class Own(nn.Module):
    """Code of its own between its modules."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.other = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x):
        h = self.up(x)
        g = (h * self.scale).exp()
        side = self.other(x)  # finite, and no part of it
        return self.down(g.reshape(2, 8)) + side


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 4), block, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(self.first(x)))


def arrived(watched, late, optimizer):
    """The record of the alarm that the next step raises: all numbers have arrived."""
    late.held.clear()
    watched.collect()
    with pytest.raises(OverflowDetected):
        optimizer.step()
    assert watched.faults == []
    (ran,) = watched.of(SecondRun)
    return ran


def ends_after_the_step(watched, late, model, spoil, x=None):
    """The record of an alarm of batch 1, whose numbers arrive when the step of that batch is over."""
    torch.manual_seed(0)
    x = torch.randn(2, 4) if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(2):
        if batch == 1:
            spoil(model)
            late.held.add(0)
        model(x).sum().backward()
        optimizer.step()
    ran = arrived(watched, late, optimizer)
    assert ran.unknown == "an optimizer step has changed the weights since"
    return ran, watched.verdict()


def test_the_operations_of_a_modules_own_code_with_their_line(watch, late):
    watched = watch(on_overflow="abort")
    ran, verdict = ends_after_the_step(watched, late, Net(Own()), lambda model: setattr(model.block, "scale", 1e4))
    assert [(line.code, line.ops) for line in ran.lines] == [("g = (h * self.scale).exp()", ["mul", "exp"])]
    assert (verdict.module, verdict.operation) == ("block", None)
    (told,) = [line for line in verdict.evidence if line.startswith("what may have made it")]
    assert "mul or exp, test_possible_lines.py:" in told
    assert told.endswith("`g = (h * self.scale).exp()`")


def test_a_module_of_torch_has_the_line_that_calls_it(watch, late):
    def spoil(model):
        model.block.up.weight.data.fill_(3e38)

    ran, _ = ends_after_the_step(watch(on_overflow="abort"), late, Net(Own()), spoil)
    assert [(line.code, line.ops) for line in ran.lines] == [("h = self.up(x)", ["addmm"])]


class Adds(nn.Module):
    """What it returns is made by code of its own, in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x):
        out = self.inner(x)
        out = out.clone()
        out *= self.scale
        out[0].mul_(self.scale)
        return torch.relu(out)


def test_an_output_and_operations_in_place(watch, late):
    ran, _ = ends_after_the_step(
        watch(on_overflow="abort"), late, Net(Adds()), lambda model: setattr(model.block, "scale", 1e30)
    )
    assert [(line.code, line.ops) for line in ran.lines] == [
        ("out *= self.scale", ["mul"]),
        ("out[0].mul_(self.scale)", ["mul"]),
    ]


class Twice(nn.Module):
    """Its one module is called twice, and the second call is handed something bad."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), 0.0

    def forward(self, x):
        y = self.fc(x.tanh())
        return self.fc(y / (1 - self.scale))


def test_the_second_call_of_a_module(watch, late):
    ran, _ = ends_after_the_step(
        watch(on_overflow="abort"), late, Net(Twice()), lambda model: setattr(model.block, "scale", 1.0)
    )
    assert [(line.code, line.ops) for line in ran.lines] == [("return self.fc(y / (1 - self.scale))", ["div"])]


class Other(nn.Module):
    """`act` runs in the second run alone."""

    def __init__(self, act):
        super().__init__()
        self.act, self.calls, self.scale, self.norm = act, 0, 1.0, nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.act(self)
            if self.act is another_way:
                return self.norm(x)
        return self.fc(self.norm(x) * self.scale)


def raises(module):
    raise RuntimeError


def another_way(module):
    """It calls `fc` no more."""


@pytest.mark.parametrize("act", [raises, another_way])
def test_a_run_that_does_not_come_there_has_no_lines(watch, late, act):
    ran, verdict = ends_after_the_step(
        watch(on_overflow="abort"), late, Net(Other(act)), lambda model: setattr(model.block, "scale", 1e39)
    )
    assert ran.lines == []
    assert not [line for line in verdict.evidence if line.startswith("what may have made it")]


def test_the_run_leaves_nothing_behind(watch, late):
    model, before = Net(Other(lambda module: None)), {}
    model.block.norm.register_forward_hook(lambda module, args, out: before.update(seen=module.num_batches_tracked + 0))

    def spoil(model):
        model.block.scale = 1e39

    ran, _ = ends_after_the_step(watch(on_overflow="abort"), late, model, spoil)
    assert [line.ops for line in ran.lines] == [["mul"]]
    assert (int(before["seen"]), int(model.block.norm.num_batches_tracked), model.block.calls) == (3, 2, 2)
    assert not any(len(part._forward_pre_hooks) for part in model.modules())


class Long(nn.Module):
    """More lines than help."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x):
        x = x * self.scale
        x = x + 1
        x = x - 1
        x = x * 2
        x = x / 2
        return self.fc(x)


def test_more_lines_than_help_are_not_told(watch, late):
    ran, _ = ends_after_the_step(
        watch(on_overflow="abort"), late, Net(Long()), lambda model: setattr(model.block, "scale", 1e39)
    )
    assert ran.lines == []


class Given(nn.Module):
    """`make` has what its last module is handed."""

    def __init__(self, make):
        super().__init__()
        self.make, self.scale = make, 1.0
        self.same, self.act, self.fc = nn.Identity(), nn.Tanh(), nn.Linear(4, 4)
        self.offset = torch.zeros(4)

    def forward(self, x):
        return self.fc(self.make(self, x))


def a_part_that_was_not_read(module, x):
    both = torch.cat([x, x * module.scale]).exp()
    module.act(both[:2])
    return both[2:] * 2


def a_number_of_pythons(module, x):
    number = (x.abs().max() * module.scale).item()
    return x * number


def the_size_of_complex_numbers(module, x):
    numbers = module.same(torch.complex(x.clamp(0.5, 1), x.clamp(0.5, 1)) * min(module.scale, 3.4e38))
    return numbers.abs()


@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (a_part_that_was_not_read, [["mul", "exp"], ["mul"]]),
        (a_number_of_pythons, [["max", "mul"], ["mul"]]),
        (the_size_of_complex_numbers, [["abs"]]),
    ],
)
def test_no_operation_is_left_out(watch, late, make, ops):
    def spoil(model):
        model.block.scale = 1e39

    ran, _ = ends_after_the_step(watch(on_overflow="abort"), late, Net(Given(make)), spoil)
    assert [line.ops for line in ran.lines] == ops


def an_attribute(module, x):
    return x + module.offset


def what_numpy_has_made(module, x):
    return torch.from_numpy((x * module.scale).detach().numpy() + 0) * 2


@pytest.mark.parametrize("make", [an_attribute, what_numpy_has_made])
def test_what_was_bad_before_its_operation_has_no_lines(watch, late, make):
    def spoil(model):
        model.block.scale = 1e39
        model.block.offset.fill_(float("inf"))

    ran, _ = ends_after_the_step(watch(on_overflow="abort"), late, Net(Given(make)), spoil)
    assert ran.lines == []


class Attends(nn.Module):
    """Softmax of scores and a mask."""

    def forward(self, x, mask):
        return torch.softmax(x @ x.T + mask, -1) @ x


class Masked(nn.Module):
    """Its mask closes a row from the second batch on."""

    def __init__(self):
        super().__init__()
        self.attends, self.is_closed = Attends(), False

    def forward(self, x):
        hidden = torch.ones(2, 2, dtype=torch.bool).triu(0 if self.is_closed else 1)
        return self.attends(x, torch.zeros(2, 2).masked_fill(hidden, float("-inf")))


def test_a_mask_is_not_what_was_bad(watch, late):
    def spoil(model):
        model.block.is_closed = True

    ran, _ = ends_after_the_step(watch(on_overflow="abort"), late, Net(Masked()), spoil)
    assert [line.ops for line in ran.lines] == [["masked_fill"], ["mm", "add", "_softmax"]]


def test_a_later_batch_serves_as_well(watch, late):
    """The numbers arrive when the model has been called again."""
    torch.manual_seed(0)
    watched, model = watch(on_overflow="abort"), Net(Own())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late.held.add(0)
    for batch in range(3):
        model.block.scale = 1e4 if batch == 1 else 1.0
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    ran = arrived(watched, late, optimizer)
    assert ran.where.batch == 1
    assert ran.unknown == "the arguments of the call that made it were gone when its numbers arrived"
    assert [(line.code, line.ops) for line in ran.lines] == [("g = (h * self.scale).exp()", ["mul", "exp"])]
