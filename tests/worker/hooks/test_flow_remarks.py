"""Parts of a model that do not learn while the others do, from a real training to the report."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.collector.assemble.insights import find_insights
from gpuwatch.core.codes import Code
from gpuwatch.core.recorder.gradient_stops import FEWEST_BATCHES
from torch import nn
from torch.nn import functional

from ..small_trainings import BATCHES, sgd, train

pytestmark = pytest.mark.quick_here(8)

assert BATCHES > FEWEST_BATCHES
CODES = (Code.DEAD_ACTIVATION, Code.GRADIENT_STOPPED, Code.PARTS_UNMOVED)


def remarks(watched):
    found = find_insights(watched.facts(), 0, {})
    assert all(each.kind != "unknown" for each in found), found
    return [each for each in found if each.code in CODES]


def stack(activation: nn.Module, bias: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 4))
    nn.init.constant_(model[0].bias, bias)
    return model


class Functional(nn.Module):
    """A function in place of a module, or one that is called twice."""

    def __init__(self, bias: float, relu=functional.relu) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.relu = relu
        nn.init.constant_(self.fc1.bias, bias)

    def forward(self, x):
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


def test_a_dead_activation_is_told_with_its_layer(watch, way):
    watched, model = watch(), stack(nn.ReLU(), bias=-100.0)
    train(model, sgd(model))
    (found,) = remarks(watched)
    assert (found.kind, found.code, found.ranks, found.since) == ("dead_activation", "GW213", [0], 0)
    assert found.modules == ["1", "0"]
    assert found.text.startswith(
        "`1` (ReLU) returned nothing but zeros on rank 0 in each of the last 20 batches that were read (batch 0 to "
        "19): a gradient of up to "
    )
    assert "reaches it and none passes, so the weights of `0` (Linear), whose outputs are up to 1.0" in found.text
    assert found.text.endswith("get exactly 0") and "warmup" in found.next


@pytest.mark.parametrize(
    ("model", "layer", "after"),
    [
        (lambda: Functional(-100.0), "fc1", "fc2"),
        (lambda: Functional(-100.0, nn.ReLU()), "fc1", "fc2"),
        (lambda: stack(nn.ReLU(inplace=True), -100.0), "0", "2"),
    ],
)
def test_a_dead_one_that_is_no_module_of_its_own(watch, model, layer, after):
    watched, model = watch(), model()
    train(model, sgd(model))
    (found,) = remarks(watched)
    assert (found.kind, found.modules) == ("dead_activation", [layer])
    assert found.text.startswith(f"`{after}` (Linear) was handed nothing but zeros on rank 0 in each of the last 20 ")
    assert f"the weights of `{layer}` (Linear) (outputs up to 1.0" in found.text


def test_of_dead_ones_in_a_row_the_last_is_told(watch):
    watched = watch()
    model = nn.Sequential(*(part for _ in range(2) for part in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        nn.init.constant_(layer.bias, -100.0)
    train(model, sgd(model))
    (found,) = remarks(watched)
    assert (found.kind, found.modules) == ("dead_activation", ["3", "2"]), "no gradient reaches the one in front of it"


@pytest.mark.parametrize(("activation", "bias", "size"), [(nn.Sigmoid(), 100.0, "1.00e+00"), (nn.Tanh(), 50.0, "1.0")])
def test_a_saturated_activation(watch, activation, bias, size):
    watched, model = watch(), stack(activation, bias)
    train(model, sgd(model))
    (found,) = remarks(watched)
    assert (found.kind, found.modules) == ("gradient_stopped", ["1", "0"])
    assert f"it returned {size}" in found.text and "is flat" in found.next


def test_it_is_counted_from_where_it_died(watch):
    watched, model = watch(), stack(nn.ReLU())
    optimizer = sgd(model)
    train(model, optimizer, batches=5)
    nn.init.constant_(model[0].bias, -100.0)
    train(model, optimizer)
    (found,) = remarks(watched)
    assert found.since == 5 and "in each of the last 20 batches" in found.text


def test_one_that_came_back_is_not_told(watch):
    watched, model = watch(), stack(nn.ReLU(), bias=-100.0)
    optimizer = sgd(model)
    train(model, optimizer)
    nn.init.zeros_(model[0].bias)
    train(model, optimizer, batches=2)
    assert remarks(watched) == []


# -- trainings whose gradients are zero and as they should be ------------------------------------------------------


class Experts(nn.Module):
    """The router sends everything to the first expert; the other one computes as well, or is handed nothing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.head = way, stack(nn.ReLU()), nn.Linear(4, 4)
        self.other = stack(nn.ReLU(), -0.01)  # of zeros its activation makes zeros

    def forward(self, x):
        given = {"weighed": x, "masked": x * 0, "none": x[:0]}[self.way]
        other = self.other(given)
        return self.head(self.first(x) + (other.sum(0) * 0 if self.way != "masked" else other))


@pytest.mark.parametrize("way", ["weighed", "masked", "none"])
def test_an_expert_that_no_token_reaches(watch, way):
    watched, model = watch(), Experts(way)
    train(model, sgd(model))
    assert remarks(watched) == []


class LowRank(nn.Module):
    """LoRA: a frozen base, and B begins at zero."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.act, self.b = nn.Linear(8, 4), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 4)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.act(self.a(x)))


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_adapters(watch, scale):
    watched, model = watch(), LowRank(scale)
    train(model, sgd(model))
    assert remarks(watched) == []


class Hinge(nn.Module):
    """A term of the loss that is met: its gradient is zero, and the weights have another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu, self.head = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.fc(x)
        return self.head(hidden) + self.relu(hidden - 100.0).sum()


class TwoHeads(nn.Module):
    """The loss is of one head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = stack(nn.ReLU()), nn.Linear(4, 4), stack(nn.ReLU(), -100.0)

    def forward(self, x):
        self.unused(x)
        return self.used(self.body(x))


class Words(nn.Module):
    """Few rows of its table are hit, and nothing but padding of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(1000, 8), nn.Embedding(4, 8, padding_idx=0)
        self.act, self.head = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        numbers = x.argmax(-1)
        return self.head(self.act(self.words(numbers) + self.kinds(numbers * 0)))


@pytest.mark.quick(3)
@pytest.mark.parametrize("model", [Hinge, TwoHeads, Words, lambda: stack(nn.ReLU()), lambda: Functional(0.0)])
def test_a_healthy_training(watch, way, model):
    watched, model = watch(), model()
    train(model, sgd(model))
    assert remarks(watched) == []


def test_few_units_on_few_samples_may_be_idle(watch):
    watched = watch()
    model = nn.Sequential(nn.Linear(8, 1), nn.ReLU(), nn.Linear(1, 4))
    nn.init.constant_(model[0].bias, -100.0)
    train(model, sgd(model))
    assert remarks(watched) == [], "20 batches of 6 are 120 numbers"


def test_a_warmup_that_begins_at_zero(watch, alone_in_a_group):
    watched, model = watch(), stack(nn.ReLU())
    optimizer = sgd(model, lr=0.0)
    train(model, optimizer, batches=10)
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, batches=30)
    assert remarks(watched) == []


# -- weights that no step moves, while others move -----------------------------------------------------------------

STEPS = 40


def in_two_groups(model: nn.Sequential, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model[0].parameters(), "lr": lr}, {"params": model[2].parameters(), "lr": 0.01}])


def test_a_group_whose_learning_rate_is_0(watch, way, alone_in_a_group):
    watched, model = watch(), stack(nn.Tanh())
    train(model, in_two_groups(model, 0.0), batches=STEPS)
    (found,) = remarks(watched)
    assert (found.kind, found.code, found.ranks, found.modules) == ("parts_unmoved", "GW215", [0], ["0"])
    assert "no step has moved `0.weight`" in found.text and "while 2 other weights moved" in found.text
    assert "learning rate" in found.next


def test_a_group_that_begins_later(watch, alone_in_a_group):
    watched, model = watch(), stack(nn.Tanh())
    optimizer = in_two_groups(model, 0.0)
    train(model, optimizer, batches=STEPS)
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, batches=2)
    assert remarks(watched) == []


def test_weights_whose_gradient_the_script_takes_away(watch, alone_in_a_group):
    def freeze(model):
        for parameter in model[0].parameters():
            parameter.grad = None

    watched, model = watch(), stack(nn.Tanh())
    train(model, sgd(model), batches=STEPS, before_step=freeze)
    assert remarks(watched) == []


def test_without_hashes_nothing_is_proven(watch):
    watched, model = watch(), stack(nn.Tanh())
    train(model, in_two_groups(model, 0.0), batches=STEPS)
    assert remarks(watched) == []
