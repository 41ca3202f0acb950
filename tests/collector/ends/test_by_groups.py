"""Who the others wait for, from the tables of process groups. Tables as real ranks have shown them."""

from __future__ import annotations

import itertools

import pytest
from gpuwatch.collector.ends.hang_groups import find_by_groups
from gpuwatch.collector.ends.hang_model import BACKWARD, RankPosition
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation

WAITED = "have waited for 300 s"


def group(begun, at=None, *issued, name="0", members="0-2", ended=None, phase=None):
    """A rank's table of one group; `issued` are the last operations, the newest last."""
    recent = [
        IssuedOperation(begun - back, *(one if isinstance(one, tuple) else (one, "float32", 8)))
        for back, one in enumerate(reversed(issued))
    ]
    size = len(members)
    state = phase or ("waiting" if at is not None else "none")
    ended = ended if ended is not None else (begun if at is None else begun - 1)
    return GroupState(name, members, size, begun, ended, state, at or begun, 300.0, recent)


def waits(*groups):
    return RankPosition("waits", groups=list(groups))


def away(*groups, kind="away", what="outside of a forward, after batch 4"):
    return RankPosition(kind, what, groups=list(groups))


def find(*ranks, world=None):
    return find_by_groups(dict(enumerate(ranks)), world or len(ranks), WAITED)


def all_reduce(number):
    return group(number, number, "all_reduce", "all_reduce")


def test_the_one_that_never_began_it_did_not_come():
    found = find(waits(all_reduce(9)), away(group(8, None, "all_reduce")), waits(all_reduce(9)))

    assert (found.rank, found.certainty, found.cause) == (1, "established", "did not come")
    assert found.statement == (
        "Rank 1 is outside of a forward, after batch 4. "
        "It never reached all_reduce, in which ranks 0, 2 have waited for 300 s."
    )
    assert found.evidence == [
        "ranks 0, 2 have begun collective 9 and not finished it: all_reduce; rank 1 has begun none after 8"
    ]


@pytest.mark.parametrize("world", [2, 0], ids=["a world of 2", "a world of unknown size"])
def test_of_a_rank_that_was_never_heard_nothing_is_said(world):
    received = GroupState("0", "0-1", 2, 0, 0, "failed", -12, 4.2, [IssuedOperation(-12, "recv", "float32", 16, 0)])
    found = find_by_groups(
        {1: RankPosition("waits", "after its script had raised", groups=[received], failed=True)}, world, WAITED
    )

    assert found is None or (found.rank, found.cause) == (None, "")


def test_a_rank_that_began_it_and_went_on_is_not_missing():
    """The root of a broadcast does not wait for the others."""
    gone_on = away(group(9, None, ("broadcast", "float32", 8, 1)))
    broadcast = group(9, 9, ("broadcast", "float32", 8, 1))
    found = find(waits(broadcast), gone_on, waits(broadcast))

    assert found is None or found.rank is None


@pytest.mark.parametrize("kind", ["may wait", "waits"])
def test_a_rank_that_waits_in_what_its_table_does_not_show_keeps_it_from_being_sure(kind):
    backward = RankPosition(kind, "in the backward's reduction of gradients", groups=[group(8)])
    found = find(waits(all_reduce(9)), away(group(8)), waits(all_reduce(9)), backward, world=4)

    assert (found.rank, found.certainty) == (1, "supported")


def reduces(begun, *issued, **more):
    """C++ has issued these, and waits for them in a backward."""
    states = [group(begun, begun, *issued or ("all_reduce",), phase="issued", ended=0, **more)]
    return RankPosition("may wait", "in the backward of batch 3", BACKWARD, groups=states)


def test_a_reduction_that_torch_has_issued_cannot_have_completed_without_a_rank_that_never_began_it():
    found = find(reduces(9), away(group(8, None, "all_reduce")), reduces(9))

    assert (found.rank, found.certainty, found.cause) == (1, "established", "did not come")
    assert found.statement.endswith(f" It never reached {BACKWARD}, in which ranks 0, 2 have waited for 300 s.")
    assert found.evidence == [
        "ranks 0, 2 have begun collective 9 and not finished it: all_reduce; rank 1 has begun none after 8"
    ]


def test_a_rank_between_two_reductions_is_not_the_one_that_did_not_come():
    found = find(reduces(9), away(group(6)), reduces(8))

    assert (found.rank, found.certainty) == (1, "established")


def test_a_reduction_that_all_have_begun_says_nothing():
    """It may have completed: torch does not show its end."""
    assert find(reduces(9), away(group(9, 9, "all_reduce", phase="issued", ended=0)), reduces(9)) is None


def test_a_rank_that_computes_stands_nowhere_whatever_torch_has_issued():
    found = find(away(group(9, 9, "all_reduce", phase="issued", ended=0)), away(group(8)), away(group(8)))

    assert found is None


def test_a_rank_whose_reduction_stands_where_others_have_a_barrier_is_the_odd_one():
    barrier = waits(group(9, 9, "all_reduce", ("barrier", "", 0)))
    found = find(barrier, reduces(9, "all_reduce", ("all_reduce", "float32", 145)), barrier)

    assert (found.rank, found.certainty, found.cause) == (1, "supported", "mismatch")
    assert found.statement.startswith("Rank 1 issued all_reduce of 145 elements of float32, where 2 other ranks issued")


def test_a_skipped_collective_shows_as_another_operation_under_the_same_number():
    skipped = waits(group(9, 9, "all_reduce", ("broadcast", "float32", 3, 0)))
    found = find(waits(all_reduce(9)), skipped, waits(all_reduce(9)))

    assert (found.rank, found.certainty, found.cause) == (1, "supported", "mismatch")
    assert found.statement == (
        "Rank 1 issued broadcast from the group's rank 0 of 3 elements of float32, where 2 other ranks issued "
        "all_reduce of 8 elements of float32: the ranks do not issue the same collectives."
    )


@pytest.mark.parametrize(
    "odd", [("all_reduce", "float32", 5), ("all_reduce", "float64", 8), ("reduce", "float32", 8, 0)]
)
def test_another_size_dtype_or_operation_is_a_mismatch(odd):
    found = find(waits(all_reduce(9)), waits(all_reduce(9)), waits(group(9, 9, "all_reduce", odd)))

    assert (found.rank, found.certainty, found.cause) == (2, "supported", "mismatch")


def test_of_two_that_differ_neither_is_the_odd_one():
    one, other = group(9, 9, "all_reduce", members="0,1"), group(9, 9, ("all_reduce", "float64", 8), members="0,1")
    found = find(waits(one), waits(other))

    assert (found.rank, found.others, found.certainty) == (None, [], "unknown")
    assert "Rank 0 issued all_reduce of 8 elements of float32, rank 1 issued" in found.statement


def stands(operation, line, *, does="", later=None):
    """A rank at this line. It has issued the operation as collective 9, then another one as 10 if it is `later`."""
    issued = [operation] if later is None else [operation, later]
    number = 8 + len(issued)
    return RankPosition("waits", "", does or issued[-1][0], line, [group(number, number, *issued, members="0,1")])


REDUCE, GATHER = ("all_reduce", "float32", 8), ("all_gather", "float32", 8)


def test_those_that_issued_different_ones_have_their_lines():
    found = find(
        stands(REDUCE, "train.py:13 in step: dist.all_reduce(t)"), stands(GATHER, "eval.py:7 in <module>: x()")
    )

    assert found.statement == (
        "Rank 0 issued all_reduce of 8 elements of float32 at train.py:13, rank 1 issued all_gather of float32 at "
        "eval.py:7, as collective 9: the ranks do not issue the same collectives. It is unknown which rank is the odd "
        "one."
    )


def test_a_line_at_which_a_rank_did_not_issue_it_is_said_to_be_where_it_is_now():
    """It waits for what it issued elsewhere, or has gone on to another one."""
    waits_only = stands(REDUCE, "train.py:15 in step: work.wait()", does="wait")
    went_on = stands(("broadcast", "float32", 8, 0), "eval.py:9 in <module>: dist.all_gather(t)", later=GATHER)
    found = find(waits_only, went_on)

    assert found.statement.startswith(
        "Rank 0 issued all_reduce of 8 elements of float32 (now at train.py:15), rank 1 issued broadcast from the "
        "group's rank 0 of 8 elements of float32 (now at eval.py:9), as collective 9: "
    )


def test_uneven_sizes_are_no_mismatch_where_a_backend_takes_them():
    ranks = [waits(group(9, 9, ("all_gather", "float32", size))) for size in (8, 9, 10)]

    assert find(*ranks).cause == "all came"


def test_numbers_that_do_not_agree_where_all_have_passed_prove_nothing():
    """As where something is counted on one rank alone: no rank is named for what the numbers say."""
    shifted = waits(group(9, 9, ("broadcast", "float32", 3, 0), "all_reduce"))
    found = find(waits(all_reduce(9)), shifted, waits(all_reduce(9)))

    assert found.rank is None
    assert found.cause != "mismatch"


def test_two_groups_in_another_order_on_one_rank():
    def ab(a, b):
        wide = {"members": "0-2"}
        return waits(
            group(a, a if a > b else None, "all_reduce", name="1", **wide) if a else group(0, name="1", **wide),
            group(b, b if b > a else None, "all_reduce", name="2", **wide) if b else group(0, name="2", **wide),
        )

    found = find(ab(1, 0), ab(0, 1), ab(1, 0))
    assert (found.rank, found.certainty, found.cause) == (1, "supported", "order")

    found = find(ab(1, 0), ab(0, 1), world=3)
    assert found is None, "a rank was not seen"


def test_of_two_ranks_with_two_groups_in_another_order_none_is_named():
    first = [group(1, 1, "all_reduce", name="1", members="0,1"), group(0, name="2", members="0,1")]
    second = [group(0, name="1", members="0,1"), group(1, 1, "all_reduce", name="2", members="0,1")]
    found = find(waits(*first), waits(*second))

    assert (found.rank, found.certainty, found.cause) == (None, "unknown", "order")


def test_a_send_that_nobody_receives():
    sends = waits(
        GroupState(
            "0",
            "0-2",
            3,
            8,
            8,
            "waiting",
            -1,
            300.0,
            [IssuedOperation(-1, "send", "float32", 4, 2), IssuedOperation(8, "barrier")],
        )
    )
    found = find(waits(all_reduce(9)), sends, waits(all_reduce(9)))
    assert (found.rank, found.certainty) == (None, "unknown")
    assert "rank 1 waits in send to rank 2" in found.statement

    found = find(away(group(8)), sends, away(group(8)))
    assert (found.rank, found.certainty, found.cause) == (2, "supported", "did not come")
    assert " It never reached the send of rank 1, in which rank 1 has waited" in found.statement


def test_a_send_and_its_receive_both_stand():
    def two(operation, peer):
        return waits(
            GroupState("0", "0,1", 2, 8, 8, "waiting", -1, 300.0, [IssuedOperation(-1, operation, "float32", 4, peer)])
        )

    assert find(two("send", 1), two("recv", 0)).cause == "all came"
    assert find(two("recv", 1), two("recv", 0)).rank is None


def test_a_chain_of_groups_is_followed_to_its_head():
    default, half = {"members": "0-3"}, {"name": "2", "members": "2,3"}
    found = find(
        waits(group(5, 5, "barrier", **default)),
        waits(group(5, 5, "barrier", **default)),
        waits(group(4, **default), group(3, 3, "all_reduce", **half)),
        away(group(4, **default), group(2, **half)),
    )

    assert (found.rank, found.certainty) == (3, "established")
    assert " It never reached all_reduce of group 2 (ranks 2, 3), in which rank 2 has" in found.statement
    assert found.statement.endswith("Ranks 0, 1 wait for those.")


def test_all_came_names_nobody():
    found = find(*[waits(all_reduce(9))] * 3)

    assert (found.rank, found.certainty, found.cause) == (None, "unknown", "all came")


def test_ranks_that_wait_for_those_that_all_came_are_not_blamed():
    """Ranks 0 and 2 have ended collective 8 and wait in 9 for rank 1, which does not get out of 8."""
    found = find(waits(all_reduce(9)), waits(all_reduce(8)), waits(all_reduce(9)))

    assert (found.rank, found.certainty, found.cause) == (None, "unknown", "all came")


def test_a_rank_that_was_stopped_in_the_middle():
    found = find(waits(all_reduce(9)), away(all_reduce(9), kind="stopped", what="stopped"), waits(all_reduce(9)))

    assert (found.rank, found.certainty) == (1, "established")


def test_a_rank_that_has_left():
    found = find(waits(all_reduce(9)), RankPosition("left", groups=[group(8)]), waits(all_reduce(9)))

    assert (found.rank, found.certainty, found.cause) == (1, "established", "left early")


def test_of_two_ranks_the_one_that_waits_may_have_issued_one_too_many():
    left, waiting = group(8, members="0-1"), group(9, 9, "all_reduce", members="0-1")
    found = find(RankPosition("left", groups=[left]), waits(waiting))

    assert (found.rank, found.others, found.certainty) == (None, [0, 1], "supported")
    assert ". Or rank 1 has issued one collective too many" in found.statement


WRITERS = {"name": "1", "members": "1-2"}


def test_a_rank_whose_thread_waits_for_another_is_not_at_the_head_of_the_chain():
    """Rank 0 waits for rank 1, whose main thread waits for its thread, whose collective waits for rank 2."""
    writes = away(group(8), group(3, 3, "all_reduce", **WRITERS), what="at train.py:7: thread.join()")
    found = find(waits(all_reduce(9)), writes, away(group(8), group(2, None, "all_reduce", **WRITERS)))

    assert (found.rank, found.certainty, found.cause) == (2, "supported", "did not come")
    assert " It never reached all_reduce of group 1 (ranks 1, 2)" in found.statement
    assert found.statement.endswith("Rank 0 waits for those.")


def test_a_circle_that_goes_over_a_thread_names_nobody():
    writes = away(group(8), group(3, 3, "all_reduce", **WRITERS))
    found = find(waits(all_reduce(9)), writes, waits(all_reduce(9), group(2, None, "all_reduce", **WRITERS)))

    assert (found.rank, found.certainty) == (None, "unknown")


def test_ranks_without_tables_are_left_to_their_stacks():
    assert find(waits(), away(), waits()) is None


@pytest.mark.parametrize("members", ["", "x", "0-99999999999", "7-9"])
def test_members_that_cannot_be_read_name_nobody(members):
    odd = [waits(group(9, 9, "all_reduce", members=members)), away(), waits(group(9, 9, "barrier", members=members))]
    found = find(*odd)

    assert found is None or found.rank is None


def test_the_order_in_which_ranks_are_shown_changes_nothing():
    ranks = {0: waits(all_reduce(9)), 1: away(group(8)), 2: waits(all_reduce(9)), 3: away(group(8), kind="stopped")}
    found = {repr(find_by_groups(dict(order), 4, WAITED)) for order in itertools.permutations(ranks.items())}
    assert len(found) == 1


def test_a_rank_whose_table_is_full_may_have_begun_what_it_does_not_show():
    full = [group(3, name=str(number)) for number in range(1, 17)]
    found = find(waits(all_reduce(9)), away(*full), waits(all_reduce(9)))

    assert found is None or found.rank is None


def test_a_rank_that_shows_no_group_is_no_proof():
    found = find(waits(all_reduce(9)), away(), waits(all_reduce(9)))

    assert (found.rank, found.certainty) == (1, "supported")
