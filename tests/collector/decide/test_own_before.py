"""A bad loss is a rank's own where no collective since the forward can have brought it: scripts sum losses to print."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.across_ranks import PassedTensor
from gpuwatch.core.events.alarms import IssuedMoment, NotedCollective
from gpuwatch.core.events.looked_again import LookedAgain
from gpuwatch.core.events.read_tensors import OperandNumbers, ScriptTensor
from gpuwatch.core.frames import LOSS_CLASS, LOSS_MODULE
from gpuwatch.core.wire.messages import EventMessage

BEFORE, AFTER = 9, 10
"""Collectives issued at the forward's end, and when the backward began."""
LOSS = ScriptTensor("loss", "main", "/x/a.py", 7, "loss = -p.log()", ["p"], ["log"], counts=True,
                    numbers=OperandNumbers("float32", [], None, "+inf"))  # fmt: skip


def noted(number=AFTER, operation="all_reduce", dtype="float32", was_read=True):
    return NotedCollective("0", number, operation, dtype, was_read)


SUM = (noted(),)


def batch(make, rank, *, bad=True, lists=SUM, after=AFTER, moments=True, received=None, proved=False):
    """A model that returns finite numbers, collectives, and a backward from the loss."""
    made = make.Batch(rank, batch=3, seq=BEFORE, clock={"0": after}, received=received)
    x, y = made.tensor(), made.tensor()
    made.call("fc", "Linear", given=[x], returned=[y])
    made.call("", "Net", given=[x], returned=[y])
    loss = made.tensor(make.INF if bad else 1.0)
    made.call(LOSS_MODULE, LOSS_CLASS, returned=[loss], phase=make.Phase.LOSS, parent=None, depth=0, seq=after)
    made.backward("fc", "Linear", "output", 1.0, seq=after)
    if made.anomaly is not None:
        where = msgspec.structs.replace(made.anomaly.where, seq=after)
        made.anomaly = msgspec.structs.replace(
            made.anomaly,
            where=where,
            again=LookedAgain(own_code_of="output", script=[LOSS], proved=proved),
            moments=[IssuedMoment(BEFORE, {"0": BEFORE})] if moments else [],
            collectives_before=[*lists],
        )
    return made


def told(make, rank, *, came_out, given, number=AFTER, operation="all_reduce", value="+inf", seq=AFTER):
    place = make.where(rank, step=3, batch=3, seq=seq)
    more = {"group": "0", "members": "0-1", "dtype": "float32", "elements": 1, "value": value}
    return EventMessage(PassedTensor(place, operation, number=number, came_out=came_out, given=given, **more))


def put(make, rank, **more):
    """What a rank reports that has put something bad in: that, and what came out."""
    seq = more.pop("seq", AFTER)
    went_in = told(make, rank, came_out=False, given="not finite", seq=seq - 1, **more)
    return [went_in, told(make, rank, came_out=True, given="not finite", seq=seq, **more)]


def got(make, rank, given="finite", **more):
    return [told(make, rank, came_out=True, given=given, **more)]


def judged(make, *batches, told=(), counts=()):
    bodies = [make.hello(nproc=len(batches)), *(body for each in batches for body in each.messages()), *told, *counts]
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))


def ranks(make, **more):
    return [batch(make, 0, bad=False), batch(make, 1, **more)]


def test_what_a_rank_has_put_into_a_sum_for_its_log_is_its_own(make):
    verdict = judged(make, *ranks(make), told=[*put(make, 1), *got(make, 0)])
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "loss", "established")
    assert verdict.cause is not None
    assert "variable `loss` of `main` is +inf" in verdict.cause.statement
    line = "rank 1 itself put +inf into all_reduce 10 of process group 0 (ranks 0 and 1): its value was bad before that"
    assert line in verdict.evidence
    assert not any("one can have brought it" in each for each in verdict.evidence)


def test_where_a_sum_in_place_is_the_loss_the_rank_whose_graph_shows_it_is_named_alone(make):
    """`dist.all_reduce(loss.data)`"""
    both = [batch(make, 0), batch(make, 1, proved=True)]
    verdict = judged(make, *both, told=[*put(make, 1), *got(make, 0)])
    assert (verdict.rank, verdict.concurrent) == (1, [])


def test_a_metric_that_came_out_finite_has_brought_nothing(make):
    verdict = judged(make, *ranks(make))
    assert (verdict.rank, verdict.certainty, verdict.cause is not None) == (1, "established", True)
    assert any("issued 1 collective after its last finite frame, and finite" in each for each in verdict.evidence)


@pytest.mark.parametrize("operation", ["all_gather", "gather"])
def test_gathered_losses_too_if_no_other_rank_had_a_bad_one(make, operation):
    alone = [*put(make, 1, operation=operation), *got(make, 0, operation=operation)]
    assert judged(make, *ranks(make), told=alone).certainty == "established"
    both = [*put(make, 1, operation=operation), *put(make, 0, operation=operation)]
    assert judged(make, *ranks(make), told=both).certainty == "supported"


@pytest.mark.parametrize(
    "lists",
    [
        (),
        (noted(9),),
        (noted(operation=""),),
        (noted(dtype="uint8"),),
        (noted(dtype=""),),
        (noted(was_read=False),),
    ],
    ids=["no list", "it is not in it", "an unknown one", "an object's bytes", "no dtype", "nobody has waited"],
)
def test_a_collective_that_was_not_read_may_have_brought_it(make, lists):
    verdict = judged(make, *ranks(make, lists=lists))
    assert (verdict.rank, verdict.certainty, verdict.cause) == (1, "supported", None)
    assert any("one can have brought it from another rank" in each for each in verdict.evidence)


@pytest.mark.parametrize("given", ["finite", ""])
def test_what_came_out_bad_and_was_not_put_in_may_be_the_others(make, given):
    verdict = judged(make, *ranks(make), told=got(make, 1, given))
    assert (verdict.rank, verdict.certainty, verdict.cause) == (1, "supported", None)


def test_a_bad_one_of_its_own_does_not_excuse_one_that_it_got(make):
    lists, after = (noted(10), noted(11)), 11
    told = [*put(make, 1, number=10), *got(make, 1, number=11, seq=11)]
    verdict = judged(make, batch(make, 0, bad=False), batch(make, 1, lists=lists, after=after), told=told)
    assert (verdict.certainty, verdict.cause) == ("supported", None)


def test_messages_or_numbers_that_nobody_counted_leave_the_doubt(make):
    for more in ({"received": {"0": {0: 1}}}, {"moments": False}, {"after": AFTER + 1}):
        verdict = judged(make, *ranks(make, **more))
        assert (verdict.certainty, verdict.cause) == ("supported", None), more


def test_a_rank_that_is_not_looked_into_or_has_told_enough_leaves_the_doubt(make):
    unseen = make.NodeBeat([make.state(1, step=3, batch=3, passed_unseen=True)], {})
    assert judged(make, *ranks(make), counts=[unseen]).certainty == "supported"
    many = [each for number in range(32) for each in got(make, 1, number=number - 40, seq=2)]
    assert judged(make, *ranks(make), told=many).certainty == "supported"
    assert judged(make, *ranks(make), told=many[:31]).certainty == "established"


def test_where_a_sum_of_losses_is_the_loss_the_rank_that_put_it_in_is_named(make):
    both = [batch(make, 0), batch(make, 1)]
    verdict = judged(make, *both, told=[*put(make, 1), *got(make, 0)])
    assert (verdict.rank, verdict.certainty, verdict.concurrent) == (1, "supported", [])
    assert verdict.cause is not None
    assert any("rank 0 met +inf after that had come out of all_reduce 10" in each for each in verdict.evidence)


def test_where_both_put_it_in_both_are_named(make):
    verdict = judged(make, batch(make, 0), batch(make, 1), told=[*put(make, 1), *put(make, 0)])
    assert (verdict.rank, verdict.certainty, [each.rank for each in verdict.concurrent]) == (0, "supported", [1])
    assert verdict.cause is not None


def test_where_nobody_put_it_in_the_sum_may_have_made_it(make):
    verdict = judged(make, batch(make, 0), batch(make, 1), told=[*got(make, 1), *got(make, 0)])
    assert (verdict.certainty, verdict.cause) == ("supported", None)
    assert any("one can have brought it" in each for each in verdict.evidence)
