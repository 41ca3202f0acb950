"""What one page says of the time between the backward and the end of the step."""

from __future__ import annotations

import pytest
from gpuwatch.collector.diagnose.local_diagnosis import from_event
from gpuwatch.collector.diagnose.origin import origin_in_page


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
    assert (found.module, found.phase, found.role, found.value) == ("fc", "optimizer", "weight", "-inf")
    assert found.is_origin
    assert found.notes == ("the optimizer's exp_avg of weight: abs min 5.00e-01, abs max 5.00e-01",)


def test_a_local_gradient_is_enough_where_nothing_was_reduced(make):
    batch = trained(make)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    assert (find(batch).phase, find(batch).source) == ("optimizer", "made")


def test_a_step_whose_gradient_nobody_saw_is_not_blamed(make):
    batch = trained(make, local=None)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    found = find(batch)
    assert (found.phase, found.source, found.seen_in) == ("weight", "weight", "optimizer")


def test_a_weight_that_was_bad_before_the_step(make):
    """A rule had hidden that in the forward."""
    batch = make.Batch()
    weights = {"weight": batch.tensor(make.NAN)}
    ignored = {"weight": make.Mark.IGNORED}
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()], weights=weights, marks=ignored)
    batch.backward("fc", "Linear", "output", 1.0)
    batch.backward("fc", "Linear", "weight", 1.0)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    assert (find(batch).phase, find(batch).source) == ("weight", "weight")


@pytest.mark.parametrize("hidden", ["IGNORED", "SCALED"])
def test_a_gradient_that_raised_no_alarm_and_went_into_the_step(make, hidden):
    batch = trained(make, local=None)
    batch.backward("fc", "Linear", "output", 1.0)
    batch.backward("fc", "Linear", "weight", make.INF, mark=getattr(make.Mark, hidden))
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    found = find(batch)
    assert (found.module, found.phase, found.role, found.value) == ("fc", "backward", "grad weight", "+inf")


def test_a_scalers_alarm_over_a_gradient_that_was_finite_here(make):
    """Another rank's inf: this one's own gradients are finite."""
    batch = trained(make)
    batch.got("fc", "Linear", {"weight": make.INF}, mark=make.Mark.SCALED)
    batch.skipped()
    assert (find(batch).source, find(batch).phase) == ("reduced", "collective")


def test_the_events_alone(make):
    batch = trained(make)
    batch.got("fc", "Linear", {"weight": make.INF})
    assert from_event(batch.anomaly).source == "reduced"
    batch = trained(make)
    batch.stepped("fc", "Linear", {"weight": make.NAN})
    assert (from_event(batch.anomaly).source, from_event(batch.anomaly).phase) == ("weight", "weight")
