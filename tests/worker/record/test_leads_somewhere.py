"""An alarm ends a job only where the bad value leads somewhere: healthy models with inf and nan, and faulty ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarms import AbsorbedValue, LedNowhere
from torch import nn

BATCHES = 3


class Apply(nn.Module):
    """A call of its own for a function without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Net(nn.Module):
    """`bad` makes a bad value of the hidden state, `uses` is what the code around it makes of that."""

    def __init__(self, bad: Callable[..., Any], uses: Callable[..., Any]) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.part = Part(bad, uses)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(torch.sigmoid(self.enter(x))))


class Part(nn.Module):
    def __init__(self, bad: Callable[..., Any], uses: Callable[..., Any]) -> None:
        super().__init__()
        self.bad = Apply(bad)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.uses(x, self.bad(x))


class Model:
    """A trained model, its optimizer, and what else a script needs."""

    def __init__(self, net: nn.Module | None = None) -> None:
        self.net = net if net is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def step(self, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.mean) -> None:
        self.optimizer.zero_grad()
        loss(self.net(x)).backward()
        self.optimizer.step()


Around = Callable[[Model, int], None]


def _each_batch(around: Around | None = None, net: nn.Module | None = None) -> None:
    model = Model(net)
    for batch in range(BATCHES):
        if around is not None:
            around(model, batch)
        model.step(torch.rand(2, 4))


def _inside(bad: Callable[..., Any], uses: Callable[..., Any]) -> Callable[[], None]:
    return lambda: _each_batch(net=Net(bad, uses))


def _nan(x: torch.Tensor) -> torch.Tensor:
    return (x.detach() - 2).log()


def _metric(model: Model, batch: int) -> None:
    with torch.no_grad():
        Apply(lambda x: x.sum() / torch.zeros(()) * 0)(torch.rand(2))


def _probe(with_gradients: bool) -> Around:
    def around(model: Model, batch: int) -> None:
        probe = copy.deepcopy(model.net)
        probe[0].weight.data.fill_(3e38)
        with torch.set_grad_enabled(with_gradients):
            probe(torch.ones(2, 4))

    return around


def _teacher(model: Model, batch: int) -> None:
    teacher = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x.masked_fill(x > 0, torch.inf)))
    with torch.no_grad():
        model.target = teacher(torch.rand(2, 4)).argmin(-1)


class FrozenRows(nn.Module):
    """Rows of a frozen table that nobody looks up are nan."""

    def __init__(self, requires_grad: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)
        self.table.weight.data[3] = torch.nan
        self.table.weight.requires_grad_(requires_grad)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(torch.zeros(2, dtype=torch.long)) + x)


class Unused(nn.Module):
    """A parameter that the forward does not use, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.empty = nn.Parameter(torch.full((4,), torch.nan))
        self.never = nn.Linear(4, 4)
        self.never.weight.data.fill_(torch.inf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


HEALTHY: dict[str, tuple[Callable[[], None], LedNowhere | None]] = {
    "nan_to_num": (_inside(_nan, lambda x, bad: x + bad.nan_to_num()), "taken away"),
    "where": (_inside(_nan, lambda x, bad: torch.where(x > 2, bad, x)), "taken away"),
    "masked_fill": (_inside(_nan, lambda x, bad: x + bad.masked_fill(x < 2, 0.0)), "taken away"),
    "clamp": (_inside(lambda x: 1 / (x - x), lambda x, bad: x + bad.detach().clamp(max=9.0)), "taken away"),
    "nobody uses it": (_inside(_nan, lambda x, bad: x), "taken away"),
    "masked distances, and min": (
        _inside(
            lambda x: (
                torch.cdist(x, x).detach() + torch.full((2,), torch.inf).diag().nan_to_num(nan=0.0, posinf=torch.inf)
            ),
            lambda x, bad: x + bad.min(-1, keepdim=True).values,
        ),
        "taken away",
    ),
    "argmin": (
        _inside(lambda x: x.detach() / 0, lambda x, bad: x + bad.argmin(-1, keepdim=True)),
        "taken away",
    ),
    "a metric inside of the model": (
        _inside(lambda x: (x.detach().sum() * 0 / 0, x), lambda x, bad: bad[1]),
        "taken away",
    ),
    "a metric under no_grad": (lambda: _each_batch(_metric), "not trained"),
    "a copy that is probed under no_grad": (lambda: _each_batch(_probe(False)), "not trained"),
    "a copy that is probed": (lambda: _each_batch(_probe(True)), "not trained"),
    "a teacher's masked scores, and argmin": (lambda: _each_batch(_teacher), "not trained"),
    "rows of a frozen table": (lambda: _each_batch(net=FrozenRows()), "no gradient"),
    "weights that nothing uses": (lambda: _each_batch(net=Unused()), "no gradient"),
}


@pytest.mark.quick(20)
@pytest.mark.parametrize(("script", "why"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_script_is_not_ended(watch, way, script, why):
    torch.manual_seed(0)
    watched = watch(on_overflow="abort")
    script()
    watched.settle()

    assert (watched.anomalies, watched.faults) == ([], [])
    assert {told.why for told in watched.of(AbsorbedValue)} == {why}
    assert watched.reader.state().overflow is False


def _frozen_copy(model: Model, weight: float) -> None:
    copied = copy.deepcopy(model.net).requires_grad_(False)
    copied[0].weight.fill_(weight)
    copied(torch.ones(2, 4))


def test_a_frozen_copy_is_not_taken_for_a_model_of_before_that_was_trained(watch, way):
    """The second model is trained after a frozen copy is gone, and is gone itself when the next copy comes."""
    watched = watch(on_overflow="abort")
    model = Model()
    model.step(torch.rand(2, 4))
    _frozen_copy(model, 1.0)
    Model().step(torch.rand(2, 4))
    model.step(torch.rand(2, 4))
    _frozen_copy(model, 3e38)
    model.step(torch.rand(2, 4))
    watched.settle()

    assert (watched.anomalies, watched.faults) == ([], [])
    assert {told.why for told in watched.of(AbsorbedValue)} == {"not trained"}


def _evaluation() -> None:
    model = Model()
    model.net[0].weight.data.fill_(2.0)
    model.step(torch.rand(2, 4))
    with torch.no_grad():
        model.net(torch.full((2, 4), 3e38))


def _inference() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net[0].weight.data.fill_(2.0)
    with torch.inference_mode():
        net(torch.full((2, 4), 3e38))


def _bad_teacher() -> None:
    model = Model()
    teacher = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x / 0))
    with torch.no_grad():
        target = teacher(torch.rand(2, 4))
    model.step(torch.rand(2, 4), lambda output: (output - target).square().mean())


def _tested_in_the_end() -> None:
    """A checkpoint is loaded into a new model, and nothing is trained after that."""
    _each_batch()
    best = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    best[0].weight.data.fill_(2.0)
    with torch.no_grad():
        best(torch.full((2, 4), 3e38))


def _copy_that_is_trained() -> None:
    model = Model()
    other = copy.deepcopy(model.net)
    other[1].weight.data.fill_(3e38)
    other(torch.full((2, 4), 1e3)).sum().backward()
    model.step(torch.rand(2, 4))


class Stashes(nn.Module):
    """What `part` keeps for itself is used by the model after `part` has returned something finite."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.part = Part(lambda x: x / 0, self._keep)
        self.late = Apply(lambda x: x * 2)
        self.kept: list[torch.Tensor] = []

    def _keep(self, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        self.kept = [bad]
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.enter(x).sigmoid()) + self.late(self.kept[0])


FAULTS: dict[str, tuple[Callable[[], None], tuple[str, str, str]]] = {
    "the code around it keeps it": (_inside(_nan, lambda x, bad: x + bad), ("part.bad", "forward", "output")),
    "nan_to_num leaves its gradient": (
        _inside(lambda x: (x - x).sqrt(), lambda x, bad: torch.where(x > 2, bad, x)),
        ("enter", "backward", "grad output"),
    ),
    "another one behind it": (
        lambda: _each_batch(lambda model, batch: _overflow(model.net.head), Net(_nan, lambda x, bad: x)),
        ("head", "forward", "output"),
    ),
    "a later call is handed it": (lambda: _each_batch(net=Stashes()), ("part.bad", "forward", "output")),
    "an evaluation": (_evaluation, ("0", "forward", "output")),
    "nothing is trained": (_inference, ("0", "forward", "output")),
    "a model that is tested in the end": (_tested_in_the_end, ("0", "forward", "output")),
    "a teacher in the loss": (_bad_teacher, ("1", "forward", "output")),
    "a copy that is trained": (_copy_that_is_trained, ("1", "forward", "output")),
    "rows of a table that is trained": (lambda: _each_batch(net=FrozenRows(True)), ("table", "forward", "weight")),
}


def _overflow(module: nn.Linear) -> None:
    module.weight.data.fill_(3e38)


def test_optimizers_are_as_without_us_when_the_hooks_are_off(watch):
    before = torch.optim.Optimizer.__init__
    watched = [watch(), watch()]
    assert torch.optim.Optimizer.__init__ is not before
    for each in watched:
        each.hooks.detach()

    assert torch.optim.Optimizer.__init__ is before


@pytest.mark.quick(15)
@pytest.mark.parametrize(("script", "place"), FAULTS.values(), ids=FAULTS)
def test_where_it_leads_somewhere_it_is_named_and_ends_the_job(watch, way, script, place):
    torch.manual_seed(0)
    watched = watch(on_overflow="abort")
    ended = False
    try:
        script()
        watched.settle()
    except OverflowDetected:
        ended = True

    first = watched.anomalies[0]
    assert ((first.module, first.phase, first.role), watched.faults) == (place, [])
    assert ended or way == "late" or script is _tested_in_the_end
