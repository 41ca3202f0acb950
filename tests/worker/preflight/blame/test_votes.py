"""Who is wrong, over votes of any kind."""

from __future__ import annotations

import pytest
from gpuwatch.worker.preflight.blame.group_blame import RankVote, judge, judge_sums_of_pairs
from hypothesis import given
from hypothesis import strategies as st

counts = st.integers(2, 9)


@st.composite
def elections(draw):
    """Votes in which any rank may have seen anything."""
    count = draw(counts)
    ranks = st.lists(st.integers(0, count - 1), unique=True)
    return {
        rank: RankVote(draw(st.sampled_from(["", "gave 1 where 2 was due"])), draw(ranks), draw(ranks))
        for rank in range(count)
    }


@given(counts, st.data())
def test_nothing_wrong_is_no_verdict(count, data):
    assert judge(dict.fromkeys(range(count), RankVote())) is None


@given(st.integers(3, 9), st.data())
def test_the_one_that_all_others_get_wrong_sends_wrong(count, data):
    bad = data.draw(st.integers(0, count - 1))
    votes = {rank: RankVote(gather_errors=[] if rank == bad else [bad]) for rank in range(count)}

    assert judge(votes).guilty == (bad,)


@given(counts, st.data())
def test_the_one_that_gets_its_own_values_wrong_sends_wrong(count, data):
    bad = data.draw(st.integers(0, count - 1))

    assert judge(dict.fromkeys(range(count), RankVote(gather_errors=[bad]))).guilty == (bad,)


@given(st.integers(3, 9), st.data())
def test_the_one_that_gets_all_others_wrong_gets_wrong(count, data):
    bad = data.draw(st.integers(0, count - 1))
    wrong = [rank for rank in range(count) if rank != bad]

    assert judge({rank: RankVote(gather_errors=wrong if rank == bad else []) for rank in range(count)}).guilty == (bad,)


@given(counts, st.data())
def test_a_single_wrong_transfer_names_nobody(count, data):
    receiver, sender = data.draw(st.permutations(range(count)))[:2]
    verdict = judge({rank: RankVote(gather_errors=[sender] if rank == receiver else []) for rank in range(count)})

    assert verdict.guilty == ()
    assert f"rank {sender} arrived wrong at rank {receiver}" in verdict.sentence


@given(st.integers(3, 9), st.data())
def test_the_only_one_that_gets_a_broadcast_wrong_is_wrong(count, data):
    bad = data.draw(st.integers(1, count - 1))
    votes = {rank: RankVote(broadcast_errors=[0] if rank == bad else []) for rank in range(count)}

    assert judge(votes).guilty == (bad,)


@given(elections())
def test_nobody_is_guilty_who_had_no_part_in_anything_wrong(votes):
    verdict = judge(votes)
    involved = {rank for rank, vote in votes.items() if vote.sum_error or vote.gather_errors or vote.broadcast_errors}
    involved |= {sender for vote in votes.values() for sender in [*vote.gather_errors, *vote.broadcast_errors]}

    assert (verdict is None) == (not involved)
    if verdict is not None:
        assert set(verdict.guilty) <= involved
        assert verdict.sentence


@pytest.mark.slow
@given(elections(), st.randoms(use_true_random=False))
def test_the_numbers_of_the_ranks_do_not_matter(votes, random):
    names = list(votes)
    random.shuffle(names)
    renamed = {
        names[rank]: RankVote(
            vote.sum_error, [names[one] for one in vote.gather_errors], [names[one] for one in vote.broadcast_errors]
        )
        for rank, vote in votes.items()
    }

    before, after = judge(votes), judge(renamed)

    assert (before is None) == (after is None)
    if before is not None:
        assert sorted(names[rank] for rank in before.guilty) == list(after.guilty)
        assert before.search == after.search


def test_a_wrong_sum_is_searched_for_in_pairs_if_there_are_more_than_two():
    wrong = RankVote("gave 1 where 2 was due")

    assert judge({0: wrong, 1: wrong, 2: wrong}).search
    assert judge({0: RankVote(), 1: wrong, 2: RankVote()}).search
    assert not judge({0: wrong, 1: wrong}).search
    assert judge({0: RankVote(), 1: wrong}).guilty == (1,)


def test_pairs_that_all_add_right_leave_the_one_with_the_wrong_sum():
    votes = {0: RankVote(), 1: RankVote("gave 1 where 2 was due"), 2: RankVote()}

    assert judge_sums_of_pairs(votes, []).guilty == (1,)
    assert judge_sums_of_pairs(dict.fromkeys(range(3), votes[1]), []).guilty == ()


def test_a_barrier_that_lets_through_is_told():
    verdict = judge({0: RankVote(barrier_error="1 of 2 ranks had reached it"), 1: RankVote()})

    assert verdict.sentence == "rank 0 left the barrier too early: 1 of 2 ranks had reached it"
