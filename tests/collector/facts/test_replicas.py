"""One rank's copy of a weight against the others', in the same batch."""

from __future__ import annotations

import pytest
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.facts.replicas import odd_weight, run_the_same_model


def model(make, rank, *, gain=1.0, body=2.0, head=3.0, out=1.0, collectives=0, **place):
    """Three modules with a weight each; `out` is what `gain` returns."""
    batch = make.Batch(rank, **place)
    x, h, y, z = batch.tensor(), batch.tensor(), batch.tensor(out), batch.tensor(out)
    batch.call("body", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor(body)})
    batch.call("gain", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor(gain)})
    weights = {"weight": batch.tensor(head)}
    batch.call("head", "Linear", given=[y], returned=[z], weights=weights, collectives=collectives)
    batch.call("", "Net", given=[x], returned=[z], collectives=collectives)
    return batch


def odd(*batches):
    """What is odd about the weight of the last rank's diagnosis."""
    facts = fold(("a0", n, body) for n, body in enumerate(body for batch in batches for body in batch.messages()))
    diagnosis = facts.ranks[0, batches[-1].rank].diagnosis
    return odd_weight(facts, diagnosis)


def test_a_weight_that_is_wildly_larger_on_one_of_two_ranks(make):
    found = odd(model(make, 0), model(make, 1, gain=1e38, out=make.INF))
    assert (found.row.role, found.ranks, found.compared, found.agreed_in) == ("weight", [0], 2, None)
    assert not found.certain
    history = [model(make, rank, batch=4, page=0) for rank in (0, 1)]
    now = model(make, 0, batch=5, page=1), model(make, 1, gain=1e38, out=make.INF, batch=5, page=1)
    assert (odd(*history, *now).certain, odd(*history, *now).agreed_in) == (True, 4)


def test_of_two_ranks_a_small_difference_is_not_certain(make):
    assert not odd(model(make, 0), model(make, 1, gain=1.5, out=make.INF)).certain


def test_of_three_ranks_two_agree(make):
    assert odd(model(make, 0), model(make, 1), model(make, 2, gain=1e38, out=make.INF)).certain


def test_a_small_difference_explains_no_overflow(make):
    """One rank's copy of a zero-initialised adapter, or of an expert, is trained on that rank alone."""
    found = odd(model(make, 0), model(make, 1), model(make, 2, gain=1.5, out=make.INF))
    assert (found.row.abs_max, found.certain, found.untrained) == (1.5, False, False)
    adapter = odd(model(make, 0, gain=0.0), model(make, 1, gain=0.0), model(make, 2, gain=1e-3, out=make.INF))
    assert (adapter.wild, adapter.certain, adapter.untrained) == (False, False, False)


def test_a_weight_that_is_not_finite_on_one_rank(make):
    ranks = [model(make, rank, batch=5, page=1) for rank in (0, 2)]
    assert odd(*ranks, model(make, 1, gain=make.NAN, out=make.NAN, batch=5, page=1)).certain


@pytest.mark.parametrize("other", [{"body": 2.5}, {"gain": 1e38}])
def test_ranks_with_weights_of_their_own(make, other):
    """Another weight differs, too; or the weight is the same on both."""
    assert odd(model(make, 0, **other), model(make, 1, gain=1e38, out=make.INF)) is None


def test_the_others_must_agree_among_themselves(make):
    ranks = [model(make, 0), model(make, 1, gain=1.25), model(make, 2, gain=1e38, out=make.INF)]
    assert odd(*ranks) is None


def test_most_of_the_other_weights_are_enough_among_three_ranks(make):
    names = [f"layer.{n}" for n in range(5)]

    def many(rank, odd_one=1.0, gain=1.0, out=1.0):
        batch = make.Batch(rank)
        for n, name in enumerate(names):
            weights = {"weight": batch.tensor(odd_one if n == 0 else 2.0)}
            batch.call(name, "Linear", given=[batch.tensor()], returned=[batch.tensor()], weights=weights)
        weights = {"weight": batch.tensor(gain)}
        batch.call("gain", "Linear", given=[batch.tensor()], returned=[batch.tensor(out)], weights=weights)
        return batch

    assert odd(many(0, odd_one=5.0), many(1), many(2, gain=9.0, out=make.INF)).compared == 4
    assert odd(many(0, odd_one=5.0), many(1, gain=9.0, out=make.INF)) is None


def test_a_model_that_is_spread_over_ranks_has_weights_of_its_own_on_each(make):
    ranks = [
        model(make, rank, gain=gain, out=out, collectives=1) for rank, gain, out in ((0, 1, 1), (1, 1e38, make.INF))
    ]
    assert odd(*ranks) is None


def test_no_page_of_another_rank_no_claim(make):
    assert odd(model(make, 1, gain=1e38, out=make.INF)) is None


def test_replicas_call_the_same_modules_and_stages_do_not(make):
    left, right, stage = model(make, 0), model(make, 1), make.Batch(2)
    stage.call("embed", "Linear", given=[stage.tensor()], returned=[stage.tensor()])
    assert run_the_same_model(left.kept(), right.kept())
    assert not run_the_same_model(left.kept(), stage.kept())
    assert not run_the_same_model(left.kept(), None)
    names = make.Batch(3, root="Other")
    for module in ("body", "gain", "head"):
        names.call(module, "Linear", given=[names.tensor()], returned=[names.tensor()])
    page = names.kept()
    assert not run_the_same_model(left.kept(), page)
