"""What one page says of the time between the backward and the end of the step."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.facts.diagnosis import from_event
from gpuwatch.collector.facts.optimizer_rules import KnownStep, can_make_non_finite
from gpuwatch.collector.facts.rank_origin import origin_in_page
from gpuwatch.core.events.looked_again import LookedAgain, OptimizerStep


def trained(make, *, weight=1.0, local=1.0, **place):
    """A forward and a backward of one module."""
    batch = make.Batch(**place)
    x, y = batch.tensor(), batch.tensor()
    batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(weight)})
    batch.call("", "Net", given=[x], returned=[y])
    if local is not None:
        batch.backward("fc", "Linear", "output", 1.0)
        batch.backward("fc", "Linear", "weight", local)
    return batch


def find(batch):
    return origin_in_page(batch.decoded(), batch.anomaly)


def test_a_gradient_that_was_finite_before_it_was_reduced(make):
    batch = trained(make)
    batch.got("fc", "Linear", {"weight": make.INF})
    found = find(batch)
    assert (found.module, found.phase, found.role, found.source) == ("fc", "collective", "grad weight", "reduced")
    assert found.sure


def test_a_gradient_that_nobody_saw_before(make):
    batch = trained(make, local=None)
    batch.got("fc", "Linear", {"weight": make.INF})
    assert not find(batch).sure


def test_a_step_that_made_a_weight_bad(make):
    batch = trained(make, rank=1, batch=2)
    batch.got("fc", "Linear", {"weight": 1.0})
    batch.stepped("fc", "Linear", {"weight": make.NEGINF, "state exp_avg weight": 0.5, "state step bias": 1.0})
    found = find(batch)
    assert (found.module, found.phase, found.role, found.row.value) == ("fc", "optimizer", "weight", "-inf")
    assert found.is_origin
    assert found.notes[0] == "the optimizer's exp_avg of weight: abs min 5.00e-01, abs max 5.00e-01"
    assert not found.sure, "nobody knows what that step did"


SGD = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
ADAM = {"lr": 1e-3, "betas[0]": 0.9, "betas[1]": 0.999, "eps": 1e-8, "weight_decay": 0.0}
STATE = {"state exp_avg weight": 0.5, "state exp_avg_sq weight": 0.1}
STEPS = {
    "SGD": ("torch.optim.sgd.SGD", SGD, {}, "changed"),
    "SGD with a wild learning rate": ("torch.optim.sgd.SGD", {**SGD, "lr": 3e38}, {}, "made"),
    "SGD with momentum": (
        "torch.optim.sgd.SGD",
        {**SGD, "momentum": 0.9},
        {"state momentum_buffer weight": 2.0},
        "changed",
    ),
    "SGD with a buffer that nobody saw": ("torch.optim.sgd.SGD", {**SGD, "momentum": 0.9}, {}, "open"),
    "SGD with a bad buffer": (
        "torch.optim.sgd.SGD",
        {**SGD, "momentum": 0.9},
        {"state momentum_buffer weight": float("inf")},
        "open",
    ),
    "Adam": ("torch.optim.adam.Adam", ADAM, STATE, "changed"),
    "AdamW": ("torch.optim.adamw.AdamW", {**ADAM, "weight_decay": 0.01}, STATE, "changed"),
    "Adam without eps": ("torch.optim.adam.Adam", {**ADAM, "eps": 0.0}, STATE, "open"),
    "Adam without eps, and a gradient that has been 0": (
        "torch.optim.adam.Adam",
        {**ADAM, "eps": 0.0},
        {**STATE, "state exp_avg_sq weight": 0.0},
        "made",
    ),
    "Adam without eps, whose divisor is another one": (
        "torch.optim.adam.Adam",
        {**ADAM, "eps": 0.0, "amsgrad": 1.0},
        {**STATE, "state exp_avg_sq weight": 0.0},
        "open",
    ),
    "Adam whose state nobody saw": ("torch.optim.adam.Adam", ADAM, {}, "open"),
    "Adam with a wild learning rate": ("torch.optim.adam.Adam", {**ADAM, "lr": 1e35}, STATE, "made"),
    "Adagrad": ("torch.optim.adagrad.Adagrad", {"lr": 0.01, "eps": 1e-10}, {"state sum weight": 1.0}, "changed"),
    "RMSprop": (
        "torch.optim.rmsprop.RMSprop",
        {"lr": 0.01, "eps": 1e-8, "centered": 0.0, "momentum": 0.0},
        {"state square_avg weight": 1.0},
        "changed",
    ),
    "RMSprop, centered": (
        "torch.optim.rmsprop.RMSprop",
        {"lr": 0.01, "eps": 1e-8, "centered": 1.0},
        {"state square_avg weight": 1.0},
        "open",
    ),
    "Adafactor": ("torch.optim.Adafactor", {"lr": 0.01, "d": 1.0, "eps[1]": 1e-3}, {}, "changed"),
    "an optimizer of somebody else's": ("lion.Lion", {"lr": 1e-4}, {}, "open"),
    "somebody else's Adam": ("apex.optimizers.Adam", ADAM, STATE, "open"),
    "no optimizer known": (None, {}, {}, "open"),
}


@pytest.mark.parametrize(("cls", "settings", "state", "expected"), STEPS.values(), ids=STEPS)
def test_a_weight_is_the_steps_work_only_if_its_rule_can_give_it(make, cls, settings, state, expected):
    batch = trained(make, rank=1, batch=2)
    batch.got("fc", "Linear", {"weight": 1.0})
    batch.stepped("fc", "Linear", {"weight": make.INF, **state})
    if cls is not None:
        batch.anomaly = msgspec.structs.replace(batch.anomaly, optimizer=OptimizerStep(cls, settings))
    found = find(batch)
    assert (found.phase, found.source, found.sure) == {
        "changed": ("weight", "changed", True),
        "made": ("optimizer", "made", True),
        "open": ("optimizer", "made", False),
    }[expected]
    text = " ".join(found.notes)
    assert ("gives no such number" in text) == (expected == "changed")
    assert ("something else changed the weight" in text) == (expected == "open")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_eps_that_is_zero_in_the_weights_dtype_divides_by_zero(dtype):
    step = OptimizerStep("torch.optim.adam.Adam", ADAM)
    known = KnownStep(1.0, 1.0, {"exp_avg": 0.0, "exp_avg_sq": 0.0}, 6, dtype)
    assert can_make_non_finite(step, known) is (None if dtype == "float16" else False)


def test_a_local_gradient_is_enough_where_nothing_was_reduced(make):
    batch = trained(make)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    assert (find(batch).phase, find(batch).source) == ("optimizer", "made")


def test_a_step_whose_gradient_nobody_saw_is_not_blamed(make):
    batch = trained(make, local=None)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    found = find(batch)
    assert (found.phase, found.source, found.row.phase) == ("weight", "weight", "optimizer")


def test_a_weight_that_was_bad_before_the_step(make):
    """A rule had hidden that in the forward."""
    batch = make.Batch()
    weights = {"weight": batch.tensor(make.NAN)}
    ignored = {"weight": make.RowMark.IGNORED}
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()], weights=weights, marks=ignored)
    batch.backward("fc", "Linear", "output", 1.0)
    batch.backward("fc", "Linear", "weight", 1.0)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    assert (find(batch).phase, find(batch).source) == ("weight", "weight")


@pytest.mark.parametrize("hidden", ["IGNORED", "SCALED"])
def test_a_gradient_that_raised_no_alarm_and_went_into_the_step(make, hidden):
    batch = trained(make, local=None)
    batch.backward("fc", "Linear", "output", 1.0)
    batch.backward("fc", "Linear", "weight", make.INF, mark=getattr(make.RowMark, hidden))
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    found = find(batch)
    assert (found.module, found.phase, found.role, found.row.value) == ("fc", "backward", "grad weight", "+inf")


def test_a_gradient_that_a_scaler_was_to_catch_and_that_the_optimizer_got(make):
    """`scaler.scale(loss).backward(); optimizer.step()`"""
    batch = trained(make, local=None)
    batch.backward("fc", "Linear", "output", 1.0, mark=make.RowMark.SCALED)
    batch.backward("fc", "Linear", "weight", make.INF, mark=make.RowMark.SCALED)
    batch.got("fc", "Linear", {"weight": make.NAN})
    again = LookedAgain(loss_scale=2.0**19)
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=again)
    found = find(batch)
    assert (found.module, found.phase, found.role, found.row.value) == ("fc", "backward", "grad weight", "+inf")
    assert "a GradScaler had scaled the loss; its scale was 524288 when the alarm was raised" in found.notes
    assert any("the optimizer was called without it" in note for note in found.notes)


def test_a_scalers_alarm_over_a_gradient_that_was_finite_here(make):
    """Another rank's inf: this one's own gradients are finite."""
    batch = trained(make)
    batch.got("fc", "Linear", {"weight": make.INF}, mark=make.RowMark.SCALED)
    batch.skipped()
    assert (find(batch).source, find(batch).phase) == ("reduced", "collective")


def test_the_events_alone(make):
    batch = trained(make)
    batch.got("fc", "Linear", {"weight": make.INF})
    assert from_event(batch.anomaly).source == "reduced"
    batch = trained(make)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    assert (from_event(batch.anomaly).source, from_event(batch.anomaly).phase) == ("weight", "weight")
