"""Real gloo groups of forked ranks, of which some are wrong."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.identity import is_peer_failure
from gpuwatch.worker.preflight.group_collectives import sum_of, values_of

pytestmark = pytest.mark.quick_here(6)  # each forks its ranks


def test_a_healthy_group_passes(run_ranks):
    outcomes = run_ranks("group", [0, 1, 2])

    assert {outcome["kind"] for outcome in outcomes.values()} == {"ok"}
    assert outcomes[0]["said"] == ["init", "all_reduce", "all_gather", "broadcast", "barrier", "votes"]
    rank_2 = "all_reduce, all_gather, broadcast and barrier over 3 ranks gave right results (gloo)"
    assert outcomes[2]["value"] == rank_2


def test_some_ranks_of_a_larger_job_form_a_group(run_ranks):
    outcomes = run_ranks("group", [3, 300])

    assert [outcome["kind"] for outcome in outcomes.values()] == ["ok", "ok"]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("ranks", "fault", "words"),
    [
        ([0, 1], "adds wrong", "rank 1 computes wrong sums: all_reduce over 2 ranks gave"),
        ([0, 1, 2], "adds wrong", "rank 1 computes wrong sums: all_reduce over 3 ranks gave"),
        ([0, 1, 2], "puts in wrong", "rank 1 computes wrong sums"),
        ([0, 1, 2], "puts in wrong in large messages", "rank 1 computes wrong sums"),
        ([0, 1, 2, 3, 4], "puts in wrong", "in every pair, while the other ranks compute right sums with each other"),
        ([0, 1, 2], "adds wrong in large groups", None),
        ([0, 1], "sends wrong", "rank 1 sends wrong values in all_gather (seen by rank 0)"),
        ([0, 1, 2], "sends wrong", "rank 1 sends wrong values in all_gather (seen by ranks 0, 2)"),
        ([0, 1, 2], "gets wrong", "rank 1 gets wrong values in all_gather that the others get right"),
        ([0, 2, 1], "broadcasts wrong", "rank 1 sends wrong values in broadcast (seen by ranks 0, 2)"),
    ],
)
def test_the_wrong_rank_is_named_by_all(run_ranks, ranks, fault, words):
    outcomes = run_ranks("group", ranks, {1: fault})

    assert {outcome["kind"] for outcome in outcomes.values()} == {"raised"}
    assert all(outcome["known"] for outcome in outcomes.values())
    (sentence,) = {outcome["detail"] for outcome in outcomes.values()}
    if words is None:
        assert {str(outcome["peers"]) for outcome in outcomes.values()} == {"[]"}
        assert "undetermined which rank computes wrong sums (tests of pairs do not show" in sentence
    else:
        assert words in sentence
        assert {rank: outcome["peers"] for rank, outcome in outcomes.items()} == {
            rank: None if rank == 1 else [1] for rank in ranks
        }
        assert "rank 1" in outcomes[0]["next"]


def test_two_that_poison_the_same_sum_blame_nobody_by_name(run_ranks):
    outcomes = run_ranks("group", [0, 1], {1: "puts in wrong"})

    assert {str(outcome["peers"]) for outcome in outcomes.values()} == {"[]"}
    assert "at all ranks, although every rank's own values arrive; undetermined" in outcomes[0]["detail"]


def test_two_wrong_ranks_are_both_named(run_ranks):
    outcomes = run_ranks("group", [0, 1, 2, 3, 4], {1: "puts in wrong", 4: "adds wrong"})

    assert "ranks 1, 4 compute wrong sums" in outcomes[0]["detail"]
    assert [outcome["peers"] for outcome in outcomes.values()] == [[1, 4], None, [1, 4], [1, 4], None]


def test_one_wrong_transfer_between_two_ranks_leaves_open_which(run_ranks):
    outcomes = run_ranks("group", [0, 1, 2, 3], {2: "gets first wrong"})

    assert {str(outcome["peers"]) for outcome in outcomes.values()} == {"[]"}
    assert "the values of rank 0 arrived wrong at rank 2 in all_gather; undetermined" in outcomes[3]["detail"]


def test_a_barrier_that_is_none_is_told(run_ranks):
    outcomes = run_ranks("group", [0, 1], {0: "skips barrier", 1: "comes late to the barrier"})

    assert "rank 0 left the barrier too early: 1 of 2 ranks had reached it" in outcomes[0]["detail"]
    assert [outcome["peers"] for outcome in outcomes.values()] == [None, [0]]


@pytest.mark.slow
def test_a_rank_whose_collectives_do_nothing_accuses_nobody(run_ranks):
    """It alone has an answer in time: the others wait for it, and are silent."""
    outcomes = run_ranks("group", [0, 1, 2], {1: "does nothing"}, timeout_s=1.0)

    assert not any(outcome["peers"] for outcome in outcomes.values()), outcomes
    assert "rank 1 got wrong values itself; undetermined" in outcomes[1]["detail"]


def test_a_rank_that_dies_leaves_errors_of_torch(run_ranks):
    outcomes = run_ranks("group", [0, 1], {1: "dies"}, timeout_s=5.0)

    assert outcomes[1]["kind"] == "died"
    assert (outcomes[0]["kind"], outcomes[0]["known"]) == ("raised", False)
    assert is_peer_failure(outcomes[0]["detail"])
    assert outcomes[0]["said"][-1] == "all_gather"


@pytest.mark.slow
def test_a_rank_that_hangs_is_outlived(run_ranks):
    outcomes = run_ranks("group", [0, 1], {1: "hangs"}, timeout_s=1.0, deadline_s=8.0)

    assert outcomes[1]["kind"] == "hung"
    assert outcomes[1]["said"][-1] == "all_gather"
    assert outcomes[0]["detail"].startswith("all_gather did not end within 1 s")
    assert (outcomes[0]["kind"], outcomes[0]["peers"]) == ("raised", [])


@pytest.mark.slow
def test_a_collective_without_an_end_of_its_own_is_given_up(run_ranks):
    """NCCL's since torch 2.8: a blocking call returns no Work, and its result is never there."""
    outcomes = run_ranks("group", [0, 1], {0: "like NCCL", 1: "like NCCL"}, timeout_s=1.0, deadline_s=10.0)

    for outcome in outcomes.values():
        assert (outcome["kind"], outcome["peers"], outcome["said"][-1]) == ("raised", [], "all_reduce")
        assert outcome["detail"].startswith("all_reduce did not end within 1 s")


def test_a_group_that_does_not_connect_is_given_up(run_ranks):
    """As ncclCommInitRank, which has no timeout."""
    outcomes = run_ranks("group", [0, 1], {0: "hangs in init", 1: "hangs in init"}, timeout_s=1.0, deadline_s=10.0)

    for outcome in outcomes.values():
        assert (outcome["kind"], outcome["peers"], outcome["said"]) == ("raised", [], ["init"])
        assert outcome["detail"] == "gloo had not connected 2 ranks within 1 s"


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_the_group_is_named(run_ranks):
    """Its device hangs, before it can connect."""
    outcomes = run_ranks("group", [0, 1, 2], {1: "never comes"}, timeout_s=1.0, deadline_s=8.0)

    assert outcomes[1]["kind"] == "hung"
    for rank in (0, 2):
        assert (outcomes[rank]["kind"], outcomes[rank]["peers"]) == ("raised", [1])
        assert outcomes[rank]["detail"] == "rank 1 did not reach the process group"


@pytest.mark.slow
def test_every_rank_puts_in_other_values_whose_sum_is_exact():
    ranks = [*range(300), 65_535]

    values = torch.stack([values_of(rank, 500) for rank in ranks])

    assert len({tuple(row.tolist()) for row in values}) == len(ranks)
    assert torch.equal(values.to(torch.float64).sum(0).to(torch.float32), sum_of(ranks, 500))
    assert sum_of(range(50_000), 122).max() < 2**24
