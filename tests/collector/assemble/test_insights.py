"""Insights: one line for what is the same on many ranks, modules and batches; nothing where there is nothing."""

from __future__ import annotations

import doctest

import numpy
import pytest
from gpuwatch.collector.assemble import insights as find
from gpuwatch.collector.assemble import insights as over_batches
from gpuwatch.collector.assemble.insights import find_insights
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.facts.kept_pages import OpenHistory
from gpuwatch.collector.report import model as insight
from gpuwatch.collector.report.run_figures import HeatModule
from gpuwatch.core.events.alarms import RangeWarning, ScalerSkip
from gpuwatch.core.wire.messages import EventMessage

BATCHES = 20


def insights_of(bodies, opened=None):
    facts = fold(("a0", n, body) for n, body in enumerate(bodies, 1))
    return find_insights(facts, 0, opened or {})


def kinds(found) -> list[str]:
    return [each.kind for each in found]


# -- rows ---------------------------------------------------------------------------------------------------------


def underflow(make, rank, module, *, batch=0, dtype="float16", role="grad weight"):
    place = make.where(rank, batch=batch)
    return EventMessage(
        RangeWarning(place, "underflow", module, "Linear", "backward", role, dtype, 1e-7, 39.0, 0.1, 0.99)
    )


def near(make, rank, module, headroom=0.5, *, batch=5, role="output"):
    place = make.where(rank, batch=batch)
    return EventMessage(
        RangeWarning(place, "near overflow", module, "Linear", "forward", role, "float16", 5e4, headroom)
    )


def trained(make, rank, *, mark=0):
    """A batch with a backward; `mark` says whether a GradScaler scaled the loss."""
    batch = make.Batch(rank)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    batch.backward("fc", "Linear", "weight", 0.5, mark=mark)
    return batch.messages()


def test_many_rows_of_underflow_are_one_finding_that_names_the_missing_scaler(make):
    rows = [underflow(make, rank, f"layer.{n}", batch=n) for rank in range(2) for n in range(41)]
    bodies = [make.hello(nproc=2), *trained(make, 0), *trained(make, 1), *rows]
    (found,) = insights_of(bodies)
    assert found.kind == "no_scaler"
    assert found.text == (
        "gradients of 41 modules (`layer.0`, `layer.1`, ...) lie below float16's smallest normal number on both ranks "
        "since batch 0, up to 99% of their elements: no GradScaler is in use"
    )
    assert "torch.amp.GradScaler" in found.next
    assert (found.ranks, len(found.modules), found.since) == ([0, 1], 41, 0)


def test_without_a_backward_nobody_knows_whether_there_is_a_scaler(make):
    (found,) = insights_of([make.hello(), underflow(make, 0, "fc")])
    assert found.text.endswith(": no GradScaler was seen")


@pytest.mark.parametrize("told_by", ["mark", "skip"])
def test_a_scaler_that_is_in_use_is_not_missed(make, told_by):
    bodies = [make.hello(), *trained(make, 0, mark=make.RowMark.SCALED if told_by == "mark" else 0)]
    if told_by == "skip":
        bodies.append(EventMessage(ScalerSkip(make.where(0), 65536.0, 1)))
    (found,) = insights_of([*bodies, underflow(make, 0, "fc")])
    assert found.kind == "scaler_too_small"


def test_another_dtype_asks_for_no_scaler(make):
    assert kinds(insights_of([make.hello(), underflow(make, 0, "fc", dtype="bfloat16")])) == ["underflow"]
    assert kinds(insights_of([make.hello(), underflow(make, 0, "fc", role="output")])) == ["underflow"]


def test_near_overflow_names_the_nearest(make):
    (found,) = insights_of([make.hello(nproc=2), near(make, 0, "up", 0.9), near(make, 1, "down", 0.1, batch=7)])
    assert found.kind == "near_overflow"
    assert (
        "outputs of `up` and `down` came close to float16's limit of 6.55e+04 on both ranks since batch 5" in found.text
    )
    assert "of `down`, rank 1, batch 7" in found.text


def test_a_loss_of_float16_that_was_inf_is_told(make):
    rows = [
        RangeWarning(
            make.where(rank, batch=4 + rank), "near overflow", "(loss)", "backward", "loss", "output", "float16"
        )
        for rank in range(2)
    ]
    (found,) = insights_of([make.hello(nproc=2), *map(EventMessage, rows)])
    assert (found.kind, found.ranks, found.modules, found.since) == ("near_overflow", [0, 1], ["(loss)"], 4)
    assert found.text.startswith("the loss was inf in float16 on both ranks since batch 4: no alarm")


def test_a_scale_that_only_falls(make):
    skips = [
        ScalerSkip(make.where(0, batch=n), 2.0**-n, n + 1, "fc", "Linear", "grad weight", "+inf") for n in range(12)
    ]
    (found,) = insights_of([make.hello(), *map(EventMessage, skips)])
    assert found.kind == "scaler_collapsing"
    assert "skipped 12 steps in a row on rank 0, the last at scale 0.000488281" in found.text
    assert "+inf in grad weight of `fc`" in found.text


def test_a_scaler_that_settles_is_no_finding(make):
    skips = [ScalerSkip(make.where(0, batch=n), 2.0 ** (16 - n), n + 1) for n in range(2)]
    assert insights_of([make.hello(), *map(EventMessage, skips)]) == []


# -- over the batches ---------------------------------------------------------------------------------------------


def history(numbers, names=("fc1", "fc2")) -> OpenHistory:
    table = numpy.array(numbers, numpy.float32)
    columns = [HeatModule(name, "Linear", "float32") for name in names]
    counted = list(range(len(table)))
    return OpenHistory(counted, counted, columns, table)


def alike(rank, *, factor=1.0, batches=BATCHES):
    noise = numpy.random.default_rng(rank).uniform(0.9, 1.1, (batches, 2))
    return history(numpy.array([[1.0, 8.0 * factor]]) * noise * 1.05 ** numpy.arange(batches)[:, None])


def test_a_module_that_returns_zeros_on_all_ranks_is_dead():
    dead = {rank: history([[1.0, 0.0]] * BATCHES) for rank in range(2)}
    (found,) = over_batches.dead_modules(dead)
    assert found.kind == "dead_module"
    assert found.text == "`fc2` returned nothing but zeros on both ranks, at least since batch 4"


def test_a_module_that_lives_on_one_rank_or_now_and_then_is_not_dead():
    zeros, ones = history([[1.0, 0.0]] * BATCHES), history([[1.0, 2.0]] * BATCHES)
    assert list(over_batches.dead_modules({0: zeros, 1: ones})) == []
    assert list(over_batches.dead_modules({0: history([[1.0, 0.0]] * (BATCHES - 1) + [[1.0, 3.0]])})) == []
    assert list(over_batches.dead_modules({0: history([[1.0, 0.0]] * 3)})) == [], "too few batches to tell"
    assert list(over_batches.dead_modules({0: history([[1.0, -1.0]] * BATCHES)})) == [], "it was not measured"


def test_one_rank_unlike_the_others_is_named():
    opened = {rank: alike(rank, factor=64.0 if rank == 5 else 1.0) for rank in range(8)}
    (found,) = over_batches.ranks_unlike(opened)
    assert (found.kind, found.ranks, found.modules) == ("rank_unlike", [5], ["fc2"])
    assert "larger there in each of the last 16 batches" in found.text
    smaller = {rank: alike(rank, factor=1 / 64 if rank == 5 else 1.0) for rank in range(8)}
    assert "smaller there" in next(over_batches.ranks_unlike(smaller)).text


def test_ranks_that_are_alike_or_too_few_give_no_name():
    assert list(over_batches.ranks_unlike({rank: alike(rank) for rank in range(8)})) == []
    assert list(over_batches.ranks_unlike({rank: alike(rank, factor=64.0 if rank else 1.0) for rank in range(3)})) == []
    two = {rank: alike(rank, factor=64.0 if rank < 2 else 1.0) for rank in range(8)}
    assert list(over_batches.ranks_unlike(two)) == [], "two ranks of another kind, as in a pipeline"
    spread = {rank: alike(rank, factor=4.0**rank) for rank in range(8)}
    assert list(over_batches.ranks_unlike(spread)) == []
    assert list(over_batches.ranks_unlike({rank: alike(rank, batches=4) for rank in range(8)})) == []


def test_batches_that_were_not_finite_name_nobody():
    opened = {rank: alike(rank) for rank in range(8)}
    opened[5].numbers[-1, 1] = numpy.inf
    assert list(over_batches.ranks_unlike(opened)) == []


# -- replicas -----------------------------------------------------------------------------------------------------


def weighed(make, rank, page, weight):
    batch = make.Batch(rank, batch=page, page=page)
    weights = {"weight": batch.tensor(weight)}
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()], weights=weights)
    batch.call(
        "head", "Linear", given=[batch.tensor()], returned=[batch.tensor()], weights={"weight": batch.tensor(2.0)}
    )
    return batch.messages()


def replicas(make, then, now):
    bodies = [make.hello(nproc=len(now))]
    for rank, weight in enumerate(now):
        bodies += [*weighed(make, rank, 0, then[rank]), *weighed(make, rank, 9, weight)]
    return bodies


def test_weights_that_agreed_once_and_differ_now_are_a_drift(make):
    (found,) = insights_of(replicas(make, [1.0, 1.0, 1.0], [1.5, 1.5, 1.75]))
    assert found.kind == "replica_drift"
    assert found.text == (
        "weights of `fc` are not the same on all 3 ranks in batch 9, but all agreed in batch 0: weight of `fc` has abs "
        "max 1.50e+00 on rank 0, 1.75e+00 on rank 2"
    )


def test_ranks_with_weights_of_their_own_do_not_drift(make):
    assert insights_of(replicas(make, [1.0, 2.0], [1.5, 1.75])) == []
    assert insights_of(replicas(make, [1.0, 1.0], [1.5, 1.5])) == []


# -- all of them --------------------------------------------------------------------------------------------------


def test_what_cannot_be_told_costs_the_others_nothing(make, monkeypatch):
    monkeypatch.setattr(find, "dead_modules", lambda opened: 1 / 0)
    found = insights_of([make.hello(), near(make, 0, "up")])
    assert kinds(found) == ["near_overflow", "unknown"]
    assert "ZeroDivisionError" in found[1].text


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(insight).failed == 0
