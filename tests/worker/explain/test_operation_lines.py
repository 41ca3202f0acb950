"""The line of the operation that made a bad loss: in the statement, in a function that has returned, or not told."""

from __future__ import annotations

from linecache import getline
from typing import Any

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from torch import nn
from torch.nn import functional

Y = torch.zeros(2, 4)
HUGE = 1e30


def squared(a, b):
    d = a - b
    return (d**2).mean()


def through_another(a, b):
    return squared(a, b) * 1.0


def doubly(a, b):
    first = (b**2).mean()
    second = (a**2).mean()
    return first + second


def likelihood(a, b):
    near = functional.gaussian_nll_loss(a, b, torch.ones(2, 4))
    far = (b**2).mean()
    return near + far


def of_any_kind(a, b, kind):
    return kind(a).mean() + (b**2).mean()


class Squared:
    def __init__(self):
        self.kept = None

    def loss(self, a, b):
        return self.of(a - b)

    def of(self, d):
        return (d**2).mean()

    def __call__(self, a, b):
        return ((a - b) ** 2).mean()


def run_backward(loss):
    loss.backward()


def inline(model, x):
    ((model(x) * HUGE - Y) ** 2).mean().backward()


def assigned(model, x):
    loss = ((model(x) * HUGE - Y) ** 2).mean()
    loss.backward()


def in_parts(model, x):
    far = (model(x) * HUGE - Y).square()
    loss = far.mean()
    loss.backward()


def in_a_function(model, x):
    loss = squared(model(x) * HUGE, Y)
    loss.backward()


def in_a_function_of_a_function(model, x):
    loss = through_another(model(x) * HUGE, Y)
    loss.backward()


def in_a_method(model, x):
    loss = Squared().loss(model(x) * HUGE, Y)
    loss.backward()


def in_a_method_of_a_variable(model, x):
    criterion = Squared()
    loss = criterion.loss(model(x) * HUGE, Y)
    loss.backward()


def handed_on(model, x):
    run_backward(((model(x) * HUGE - Y) ** 2).mean())


def handed_on_in_a_variable(model, x):
    loss = squared(model(x) * HUGE, Y)
    run_backward(loss)


def in_one_of_two_branches(model, x):
    if x.sum() > -HUGE:
        out = model(x) * HUGE - Y
        loss = (out**2).mean()
        del out
    else:
        loss = (Y**2).mean()
    loss.backward()


def on_one_of_two_lines(model, x):
    loss = doubly(model(x) * HUGE, Y)
    loss.backward()


def in_a_function_of_torch(model, x):
    loss = likelihood(model(x) * HUGE, Y)
    loss.backward()


def in_a_function_that_may_be_any(model, x):
    loss = of_any_kind(model(x) * HUGE, Y, torch.square)
    loss.backward()


def in_an_object_that_is_called(model, x):
    criterion = Squared()
    loss = criterion(model(x) * HUGE, Y)
    loss.backward()


def kept_by_an_object(model, x):
    keeper = Squared()
    keeper.kept = (model(x) * HUGE - Y).square().mean()
    (keeper.kept + (Y**2).mean()).backward()


def kept_in_a_table(model, x):
    kept = {"far": [(model(x) * HUGE - Y).square().mean()]}
    (kept["far"][0] + (Y**2).mean()).backward()


def beside_a_large_list(model, x):
    many = [*range(1 << 17)]
    (squared(model(x) * HUGE, Y) * len(many)).backward()


def under_a_condition(model, x):
    if ((model(x) * HUGE - Y) ** 2).mean().backward() is None:
        Y.pow(2)


def run_to_the_alarm(model, backward):
    with pytest.raises(OverflowDetected):
        backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("case", "code"),
    [
        (inline, "((model(x) * HUGE - Y) ** 2).mean().backward()"),
        (assigned, "loss = ((model(x) * HUGE - Y) ** 2).mean()"),
        (in_parts, "far = (model(x) * HUGE - Y).square()"),
        (in_a_function, "return (d**2).mean()"),
        (in_a_function_of_a_function, "return (d**2).mean()"),
        (in_a_method, ""),
        (in_a_method_of_a_variable, "return (d**2).mean()"),
        (handed_on, "run_backward(((model(x) * HUGE - Y) ** 2).mean())"),
        (handed_on_in_a_variable, "return (d**2).mean()"),
        (in_one_of_two_branches, ""),
        (on_one_of_two_lines, ""),
        (in_a_function_of_torch, ""),
        (in_a_function_that_may_be_any, ""),
        (in_an_object_that_is_called, ""),
        (kept_by_an_object, ""),
        (kept_in_a_table, ""),
        (beside_a_large_list, ""),
        (under_a_condition, ""),
    ],
    ids=lambda each: each.__name__.replace("_", " ") if callable(each) else "",
)
def test_the_line_of_what_made_the_loss_bad(watch: Any, case: Any, code: str) -> None:
    watched = watch(on_overflow="abort")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    model(x).mean().backward()
    run_to_the_alarm(model, lambda: case(model, x))
    (ran,) = watched.of(SecondRun)
    assert ran.operation is not None, ran.unknown
    assert ran.operation.code == code
    assert (ran.operation.line > 0) is bool(code)
    if code:
        assert getline(__file__, ran.operation.line).strip() == code
    assert watched.faults == []


def test_where_a_module_is_not_read_it_may_have_run_the_operation(watch):
    watched = watch(modules=("no such one",), on_overflow="abort")
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    run_to_the_alarm(model, lambda: in_a_function(model, x))
    (ran,) = watched.of(SecondRun)
    assert ran.operation is not None, ran.unknown
    assert (ran.operation.op, ran.operation.line) == ("aten.pow.Tensor_Scalar", 0)


def noise_ratio(a, b):
    """0 / 0 for a target of zeros. What `a` was is not known once this has returned."""
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    near = (a * b).sum(-1, keepdim=True) * b / b.square().sum(-1, keepdim=True)
    return torch.log10(near.square().sum(-1) / (a - near).square().sum(-1)).mean()


def test_where_no_operation_is_certain_the_node_that_was_handed_a_zero_is_known(watch):
    watched = watch(on_overflow="abort")
    torch.manual_seed(0)
    model = nn.Conv1d(1, 1, 3, padding=1)  # what it returned cannot be computed again from the graph
    loss = noise_ratio(model(torch.randn(2, 1, 4)), torch.tensor([[[1.0, 2, 3, 4]], [[0, 0, 0, 0]]]))
    run_to_the_alarm(model, loss.backward)
    (anomaly,) = watched.anomalies
    (variable,) = (each for each in anomaly.again.script if each.name == "loss")
    assert (variable.numbers.value, variable.nodes) == ("nan", ["DivBackward0"])
    assert watched.faults == []
