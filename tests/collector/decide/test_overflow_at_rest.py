"""What is known of an overflow when no rank moves: named, and whether the job is ended for it."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.overflow_at_rest import overflow_at_rest
from gpuwatch.collector.decide.overflow_verdict import overflow_verdict
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import EventMessage


def at_rest(make, batch, *, newest, anomaly=False):
    bodies = [body for body in batch.messages() if anomaly or not isinstance(body, EventMessage)]
    bodies += [make.hello(nproc=2), NodeBeat([make.state(1, batch=newest)], {})]
    facts = fold([("a0", number, body) for number, body in enumerate(bodies, 1)])
    return overflow_at_rest(facts, overflow_verdict(facts))


def overflow(make, *, returns=True, has_gradients=True, root_returns=None):
    batch = make.Batch(1, batch=4, page=4)
    given, bad = [batch.tensor()], batch.tensor(make.INF)
    batch.call("fc", "Linear", given=given, returned=[bad], weights={"weight": batch.tensor()})
    if returns:
        batch.call("", "Net", given=given, returned=[bad if root_returns is None else batch.tensor(root_returns)])
    if has_gradients:
        batch.backward("fc", "Linear", "weight", 1.0)
    return batch


def test_a_bad_value_in_the_pages_of_a_rank_that_rests_is_named_and_ends_the_job(make):
    found = at_rest(make, overflow(make), newest=4)

    assert found is not None
    assert found.statement.startswith("Rank 1 on h0 overflowed first: +inf in the output of `fc` (Linear)")
    assert found.ends


@pytest.mark.parametrize(
    "undecided", [{"returns": False, "has_gradients": False}, {"has_gradients": False}], ids=["inside", "untrained"]
)
def test_one_that_may_still_lead_nowhere_is_named_and_does_not_end_the_job(make, undecided):
    """Its forward has not returned; or nothing shows that its model is trained."""
    found = at_rest(make, overflow(make, **undecided), newest=4)

    assert found is not None
    assert not found.ends


def test_one_that_the_model_has_taken_away_is_none(make):
    assert at_rest(make, overflow(make, root_returns=1.0), newest=4) is None


def test_one_that_the_rank_has_told_itself_ends_the_job_as_it_said(make):
    found = at_rest(make, overflow(make, has_gradients=False), newest=4, anomaly=True)

    assert found is not None
    assert found.ends


def test_a_hang_of_many_batches_later_is_one_of_its_own(make):
    assert at_rest(make, overflow(make), newest=5, anomaly=True) is not None
    assert at_rest(make, overflow(make), newest=60, anomaly=True) is None
