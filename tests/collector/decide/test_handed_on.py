"""What a rank was fed is its own only if nothing has passed between the last finite value that was seen and that."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold


def judge(make, *batches):
    bodies = [make.hello(nproc=len({batch.rank for batch in batches}))]
    bodies += [body for batch in batches for body in batch.messages()]
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies)))


def called(make, rank, number, *, seq=0, root="Net", module="fc", gradient=None, **place):
    """A forward of a model that is handed `number`; the gradient of what it returned, if that is given."""
    batch = make.Batch(rank, root=root, seq=seq, clock={"0": seq} if seq else {}, **place)
    x, y = batch.tensor(number), batch.tensor(number)
    batch.call(module, "Linear", given=[x], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", root, given=[x], returned=[y])
    if gradient is not None:
        batch.backward(module, "Linear", "output", gradient[0], seq=gradient[1])
    return batch


def ranks(make, seq, **bad):
    """Two ranks after a batch that ended with 5 collectives; rank 1 is fed a nan."""
    before = [called(make, rank, 1.0, seq=5, page=0, batch=0, step=0, **bad) for rank in (0, 1)]
    now = [called(make, rank, make.NAN if rank else 1.0, seq=seq, page=2, batch=1, step=1, **bad) for rank in (0, 1)]
    return [*before, *now]


def test_where_nothing_has_passed_it_is_the_ranks_own(make):
    verdict = judge(make, *ranks(make, 5))
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "input", "established")
    assert "data loader" in verdict.next[0]


def test_replicas_that_have_issued_a_collective_leave_a_doubt(make):
    """Such as the sum of a loss that is printed."""
    verdict = judge(make, *ranks(make, 7))
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "input", "supported")
    assert (
        "rank 1 issued 2 collectives, sends or receives between what it did before and that call: one can have "
        "brought it from another rank"
    ) in verdict.evidence
    assert verdict.next[0].startswith("Look at what this rank receives")


@pytest.mark.parametrize(("unseen", "named"), [(False, 1), (True, None)])
def test_of_replicas_one_that_gets_messages_is_named_only_if_what_is_in_them_is_looked_at(make, unseen, named):
    batches = ranks(make, 7, received={"0": {0: 1}})
    state = make.NodeBeat([make.state(1, step=1, batch=1, passed_unseen=unseen)], {})
    bodies = [make.hello(nproc=2), *(body for batch in batches for body in batch.messages()), state]
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies)))
    assert (verdict.rank, verdict.certainty) == (named, "unknown" if unseen else "supported")


def test_before_the_first_batch_all_collectives_count(make):
    verdict = judge(make, called(make, 0, 1.0, seq=3), called(make, 1, make.NAN, seq=3))
    assert (verdict.rank, verdict.certainty) == (1, "supported")
    assert any("3 collectives" in line and "its start" in line for line in verdict.evidence)


def test_a_stage_that_has_received_something_is_not_named(make):
    """Rank 0 runs the stage before; between its module and its send is the script's own code."""
    first = [called(make, 0, 1.0, seq=5 + n, page=n, batch=n, root="First", module="a") for n in (0, 1)]
    second = [
        called(make, 1, make.INF if n else 1.0, seq=5 + n, page=n, batch=n, root="Second", module="b") for n in (0, 1)
    ]
    verdict = judge(make, *first, *second)
    assert (verdict.rank, verdict.phase, verdict.certainty) == (None, "collective", "unknown")
    assert "it may have come from any rank" in verdict.statement
    assert any("rank 1 issued 1 collectives, sends or receives" in line for line in verdict.evidence)
    assert not any("data loader" in line for line in verdict.next)


@pytest.mark.parametrize(("seq", "certainty"), [(5, "established"), (6, "supported")])
def test_a_gradient_from_outside_may_have_been_received(make, seq, certainty):
    """Between the forward's end and the first gradient a collective can have brought it."""
    batches = [
        called(make, rank, 1.0, seq=5, gradient=(make.INF if rank else 1.0, seq), batch=1, page=1) for rank in (0, 1)
    ]
    verdict = judge(make, *batches)
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "backward", certainty)
    assert ("Look at the loss" in verdict.next[0]) == (certainty == "established")
    assert any("between the forward's end and that" in line for line in verdict.evidence) == (seq > 5)
