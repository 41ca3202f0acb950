"""From which rank a value came that another was handed, by what the ranks tell of their collectives and messages."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.facts.words import fields_of
from gpuwatch.core.events.across_ranks import PassedTensor
from gpuwatch.core.events.read_tensors import ReducedElement
from gpuwatch.core.wire.messages import EventMessage

HUGE = 2e38


def tells(make, rank, operation, number, *, came_out=True, value="+inf", given="", largest=None, seq=3, **more):
    """What a rank tells of an operation with six elements."""
    more = {"group": "0", "members": "0-3", "dtype": "float32", "elements": 6, **more}
    place = make.where(rank, step=2, batch=2, seq=seq)
    return EventMessage(
        PassedTensor(
            place, operation, number=number, came_out=came_out, value=value, given=given, given_max=largest, **more
        )
    )


def put(make, rank, operation, number, **more):
    return tells(make, rank, operation, number, came_out=False, given="not finite", **more)


def fed(make, rank, *, seq=4, bad=None, **place):
    """A rank whose model was handed something bad."""
    batch = make.Batch(rank, batch=2, seq=seq, clock={"0": 3}, **place)
    given = batch.tensor(bad if bad is not None else make.INF)
    batch.call("", "Net", given=[given], returned=[batch.tensor(make.NAN)])
    return batch.messages()


def verdict_of(make, *messages):
    """Of four ranks. Each argument is a list of messages."""
    bodies = [make.hello(nproc=4), *(body for several in messages for body in several)]
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))


def test_the_sender_is_named_and_not_who_was_handed_it(make):
    verdict = verdict_of(
        make,
        fed(make, 1),
        [put(make, 0, "send", 5, peer=1, tag=2), tells(make, 1, "recv", 5, peer=0, tag=2)],
    )
    assert (verdict.rank, verdict.module, verdict.phase, verdict.certainty) == (0, None, "collective", "supported")
    assert "put +inf into message 5 from rank 0 to rank 1; rank 1 received it" in verdict.statement


def test_which_elements_one_rank_put_in_bad_and_what_each_had_where_the_sum_is_bad(make):
    first = put(make, 0, "send", 5, peer=1, tag=2, element="one element of 6, at [0, 4]")
    verdict = verdict_of(make, fed(make, 1), [first, tells(make, 1, "recv", 5, peer=0, tag=2)])
    assert verdict.evidence[0].endswith("to rank 1; not finite there: one element of 6, at [0, 4]")

    more = {"given": "finite", "largest": HUGE}
    told = [
        tells(make, rank, "all_reduce", 4, **more, reduced=ReducedElement([0, 4], HUGE / (rank + 1)))
        for rank in range(4)
    ]
    verdict = verdict_of(make, *(fed(make, rank) for rank in range(4)), told)
    assert (verdict.rank, verdict.certainty) == (None, "established")
    (line,) = [line for line in verdict.evidence if line.startswith("element [0, 4] of all_reduce 4 ")]
    shown = "2.00e+38 on rank 0, 1.00e+38 on rank 1, 6.67e+37 on rank 2, 5.00e+37 on rank 3"
    assert line.endswith(f": {shown}; their sum is beyond 3.40282e+38 (float32)")
    assert any("--explain 2" in step and "--rank" not in step for step in verdict.next)


def test_it_is_followed_from_rank_to_rank(make):
    verdict = verdict_of(
        make,
        fed(make, 2),
        [put(make, 0, "send", 1, peer=1, seq=1), tells(make, 1, "recv", 1, peer=0, seq=1)],
        [put(make, 1, "send", 1, peer=2, seq=2), tells(make, 2, "recv", 1, peer=1, seq=3)],
    )
    assert verdict.rank == 0
    assert [line for line in verdict.evidence if line.startswith("rank ")][:3] == [
        "rank 0 put +inf into message 1 from rank 0 to rank 1",
        "rank 1: +inf came out of message 1 from rank 0 to rank 1, 6 elements of float32",
        "rank 2: +inf came out of message 1 from rank 1 to rank 2, 6 elements of float32",
    ]


def test_a_rank_whose_model_was_handed_what_it_then_passed_on_is_named_with_its_model(make):
    """A broadcast from rank 3: every rank's model was fed it, its own as well."""
    ranks = [fed(make, rank) for rank in range(4)]
    told = [tells(make, rank, "broadcast", 7, peer=3) for rank in range(4)]
    verdict = verdict_of(make, *ranks, [put(make, 3, "broadcast", 7, peer=3), *told])
    assert (verdict.rank, verdict.phase, verdict.role) == (3, "input", "input[0]")
    assert verdict.concurrent == []
    assert any("rank 3 put +inf into broadcast 7" in line for line in verdict.evidence)


def test_what_came_back_a_step_later_is_not_where_it_came_from(make):
    """Rank 1's code passed it to rank 0 in its backward; the weight that became bad of it is handed to rank 1 later."""
    later = make.Batch(1, batch=3, step=3, seq=6, clock={"0": 6})
    later.call("", "Net", given=[later.tensor(make.INF)], returned=[later.tensor(make.NAN)])
    verdict = verdict_of(
        make,
        fed(make, 0),
        later.messages(),
        [put(make, 1, "send", 5, peer=0), tells(make, 0, "recv", 5, peer=1)],
    )
    assert (verdict.rank, verdict.module, verdict.phase, verdict.certainty) == (1, None, "collective", "supported")


def summed(make, *sizes, value="+inf", members="0-1"):
    return [
        tells(make, rank, "all_reduce", 7, given="finite", largest=size, value=value, members=members)
        for rank, size in enumerate(sizes)
    ]


def test_a_sum_of_finite_numbers_is_no_ranks_fault(make):
    verdict = verdict_of(make, fed(make, 0), fed(make, 1), summed(make, HUGE, HUGE))
    assert (verdict.rank, verdict.phase, verdict.certainty) == (None, "collective", "established")
    assert "what every rank put in was finite, but their sum was not (float32)" in verdict.statement


def of_gradient(make, rank, own, got, **more):
    """A rank with a gradient of its own, and what its optimizer got."""
    batch = make.Batch(rank, batch=2, step=2, seq=4, clock={"0": 4}, **more)
    batch.call("fc", "Linear", weights={"weight": batch.tensor()}, given=[batch.tensor()], returned=[batch.tensor()])
    batch.backward("fc", "Linear", "weight", own)
    batch.got("fc", "Linear", {"weight": got})
    return batch.messages()


@pytest.mark.parametrize(
    ("told", "rank"),
    [
        (lambda make: [put(make, 1, "all_reduce", 3, members="0-1", dtype="float16", elements=40)], 1),
        (lambda make: [put(make, rank, "all_reduce", 3, members="0-1", elements=40) for rank in range(2)], None),
        (lambda make: [], None),
    ],
    ids=["by one", "by both", "by nobody"],
)
def test_who_alone_put_a_bad_value_into_the_sum_of_the_gradients_is_named(make, told, rank):
    gave = {each.event.where.rank for each in told(make)}
    out = [
        tells(make, each, "all_reduce", 3, members="0-1", elements=40, given="not finite" if each in gave else "finite")
        for each in range(2)
    ]
    ranks = [message for each in range(2) for message in of_gradient(make, each, 1.0, make.INF)]
    messages = [*ranks, *told(make), *out]
    bodies = [make.hello(nproc=2), *messages]
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))
    assert (verdict.rank, verdict.phase, verdict.module) == (rank, "collective", "fc")
    assert ("made by rank 1 between its backward and all_reduce 3" in verdict.statement) == (rank == 1)


OTHERS = {
    "too small to overflow": lambda make: summed(make, 1.0, 1.0),
    "nan is no sum of finite numbers": lambda make: summed(make, HUGE, HUGE, value="nan"),
    "one rank has told nothing": lambda make: summed(make, HUGE, HUGE, members="0-2"),
    "two ranks have put it in": lambda make: [
        *(put(make, rank, "all_reduce", 7, members="0-1") for rank in range(2)),
        *(tells(make, rank, "all_reduce", 7, given="not finite", members="0-1") for rank in range(2)),
    ],
    "one of two has lost what it put in": lambda make: [
        put(make, 1, "all_reduce", 7, members="0-1"),
        *(tells(make, rank, "all_reduce", 7, given="not finite", members="0-1") for rank in range(2)),
    ],
    "another tensor": lambda make: [
        put(make, 1, "send", 5, peer=0),
        tells(make, 0, "recv", 5, peer=1, elements=7),
    ],
    "another message": lambda make: [put(make, 1, "send", 6, peer=0), tells(make, 0, "recv", 5, peer=1)],
    "another tag": lambda make: [put(make, 1, "send", 5, peer=0, tag=1), tells(make, 0, "recv", 5, peer=1)],
    "it came later": lambda make: [put(make, 1, "send", 5, peer=0), tells(make, 0, "recv", 5, peer=1, seq=9)],
    "whoever sent it is not known": lambda make: [put(make, 1, "send", 5, peer=0), tells(make, 0, "recv", 5)],
}


@pytest.mark.parametrize("told", OTHERS.values(), ids=OTHERS)
def test_without_a_whole_way_nothing_is_said_of_it(make, told):
    verdict = verdict_of(make, fed(make, 0), told(make))
    assert (verdict.rank, verdict.phase) == (0, "input")


def test_a_finite_rank_stays_out_of_it_whatever_order_the_messages_come_in(make):
    messages = [
        *fed(make, 1),
        put(make, 0, "send", 5, peer=1),
        tells(make, 1, "recv", 5, peer=0),
    ]
    assert verdict_of(make, messages) == verdict_of(make, messages[::-1])


def test_the_report_has_what_passed(make):
    facts = fold([("a0", 1, tells(make, 1, "recv", 5, peer=0, tag=2))])
    (one,) = (fields_of(one, "step", "batch") for one in facts.ranks[0, 1].passed)
    assert one == {
        "step": 2,
        "batch": 2,
        "operation": "recv",
        "group": "0",
        "members": "0-3",
        "number": 5,
        "peer": 0,
        "tag": 2,
        "came_out": True,
        "value": "+inf",
        "dtype": "float32",
        "elements": 6,
        "given": "",
        "given_max": None,
        "element": "",
        "reduced": None,
    }
