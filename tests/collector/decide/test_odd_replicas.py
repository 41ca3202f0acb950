"""Which tensor of which rank is odd, and what differs because that is meant."""

from __future__ import annotations

import random
import struct

import pytest
from gpuwatch.collector.assemble.insights import find_insights
from gpuwatch.collector.decide.odd_replicas import odd_tensors
from gpuwatch.collector.facts.rank_facts import RankFacts
from gpuwatch.collector.facts.run_facts import RunFacts
from gpuwatch.core.events.across_ranks import HashFlag, ReplicaHashes
from gpuwatch.core.events.run_position import RunPosition

R, W = int(HashFlag.REPLACED), int(HashFlag.WRITTEN)
TABLE = ["w fc1.weight float32 [4, 4]", "w fc2.weight float32 [4, 4]", "b rotary.inv_freq float32 [8]"]


def ranks_of(*columns, batches=(0, 1, 2, 4), table=TABLE, clock=lambda rank, batch: {"0": 3 + batch}, order=None):
    """Ranks of columns: for each line of the table, for each batch, a text with a letter for each rank's hash.

    `AAAB` is odd on rank 3. A `+` behind a letter: written in place since the batch before; `*`: replaced.
    """
    count = len(columns[0][0].replace("+", "").replace("*", ""))
    facts = {rank: RankFacts(rank, 0) for rank in range(count)}
    for number, batch in enumerate(batches):
        cells = [_cells(column[number]) for column in columns]
        for rank in range(count):
            where = RunPosition(rank, step=batch, batch=batch, root="Net", clock=clock(rank, batch), time_ns=number)
            hashes = b"".join(struct.pack("<I", ord(cell[rank][0])) for cell in cells)
            flags = bytes(R if not number else cell[rank][1] for cell in cells)
            facts[rank].hashes.append(ReplicaHashes(where, 1, hashes, flags, table if not number else []))
    if order is not None:
        for rank in facts.values():
            order.shuffle(rank.hashes)
    return list(facts.values())


def _cells(text):
    found = []
    for letter in text:
        if letter in "+*":
            found[-1] = found[-1][0], W if letter == "+" else R
        else:
            found.append((letter, 0))
    return found


SAME = ["AAAA", "B+B+B+B+", "C+C+C+C+", "D+D+D+D+"]
FIXED = ["AAAA"] * 4


def told(ranks):
    return [(odd.rank, odd.name, odd.since, odd.agreed_in) for odd in odd_tensors(ranks)]


def test_replicas_that_agree():
    assert told(ranks_of(SAME, SAME, FIXED)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_flipped_bit_a_garbage_buffer_and_a_missed_broadcast(seed):
    order = random.Random(seed)
    flipped = ["AAAA", "B+B+B+B+", "C+C+X+C+", "D+D+Y+D+"]
    garbage = ["AAAX"] * 4
    assert told(ranks_of(flipped, SAME, garbage, order=order)) == [
        (2, "fc1.weight", 2, 1),
        (3, "rotary.inv_freq", 0, None),
    ]
    missed = ["AAAA", "AAAA", "B+AB+B+", "BABB"]
    assert told(ranks_of(SAME, SAME, missed, order=order)) == [(1, "rotary.inv_freq", 2, 1)]


def test_a_rank_that_agrees_again_is_not_told():
    assert told(ranks_of(["AAAA", "AABA", "AAAA", "AAAA"], SAME, FIXED)) == []


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ((["ABCD", "EFGH", "IJKL", "MNOP"], SAME, ["AAAX"] * 4), "weights of their own"),
        ((["AAAA", "BCDE", "FGHI", "JKLM"], SAME, FIXED), "zeros at first, then trained apart: a local head"),
        ((["AABB"] * 4, SAME, FIXED), "two pairs: stages of a pipeline, experts"),
        ((SAME, SAME, ["AAAA", "B+C+D+E+", "F+G+H+I+", "J+K+L+M+"]), "statistics of each rank's own data"),
        ((SAME, SAME, ["AAAA", "AAAB*", "AAAB", "AAAB"]), "a longer sequence: frequencies made anew on one rank"),
        ((SAME, SAME, ["AAAA", "B*B*B*A", "BBBA", "BBBA"]), "the same on three ranks"),
        ((SAME, SAME, ["AAAA", "AAAB+", "AAAB", "AAAB"]), "code that writes a rank's own values"),
    ],
)
def test_what_differs_because_it_is_meant_is_not_told(columns, why):
    assert told(ranks_of(*columns)) == [], why


def test_statistics_of_their_own_hide_no_odd_weight():
    local = ["AAAA", "B+C+D+E+", "F+G+H+I+", "J+K+L+M+"]
    assert told(ranks_of(["AAXA", "B+B+Y+B+", "CCZC", "DDWD"], SAME, local)) == [(2, "fc1.weight", 0, None)]


def test_of_two_ranks_only_what_changed_without_a_trace_is_odd():
    assert told(ranks_of(["AB"] * 4, ["AA"] * 4, ["AA"] * 4)) == []
    trained = ["AA", "B+B+", "C+D+", "E+F+"]
    assert told(ranks_of(trained, ["AA"] * 4, ["AA"] * 4)) == []
    assert told(ranks_of(["AA"] * 4, ["AA"] * 4, ["AA", "AA", "AB", "AB"])) == [(1, "rotary.inv_freq", 2, 1)]


@pytest.mark.parametrize(
    "clock",
    [
        lambda rank, batch: {},  # independent jobs
        lambda rank, batch: {"0": 0},
        lambda rank, batch: {"0": batch + rank},  # not the same point
        lambda rank, batch: {"0": 3, f"stage {rank}": batch},
    ],
)
def test_ranks_that_are_not_known_to_be_at_one_point_are_not_compared(clock):
    assert told(ranks_of(["AAAX"] * 4, SAME, FIXED, clock=clock)) == []


def test_a_group_that_was_destroyed_at_the_end_is_the_one_of_before():
    at_end = lambda rank, batch: {"0": 3 + batch} if batch < 4 else {}  # noqa: E731  # a table's cell
    assert told(ranks_of(["AAAA", "AAAA", "AAAA", "AAXA"], SAME, FIXED, clock=at_end)) == [(2, "fc1.weight", 4, 2)]


def test_damaged_hashes_are_left_out():
    ranks = ranks_of(["AAAX"] * 4, SAME, FIXED)
    for event in list(ranks[0].hashes):
        ranks[0].hashes.append(ReplicaHashes(event.where, 7, event.hashes, event.flags))
        ranks[0].hashes.append(ReplicaHashes(event.where, 1, event.hashes[:-1], event.flags))
    assert told(ranks) == [(3, "fc1.weight", 0, None)]


def test_a_thousand_ranks_with_one_odd_node_of_eight():
    odd = "A" * 992 + "B" * 8
    (column,) = {tuple([odd] * 4)}
    same = ["A" * 1000] * 4
    assert [rank for rank, *_ in told(ranks_of(list(column), same, same))] == list(range(992, 1000))


def test_the_insight_says_it_in_words():
    facts = RunFacts()
    for rank in ranks_of(["AAAA", "B+B+B+B+", "C+C+X+C+", "D+D+Y+D+"], SAME, ["AAAX"] * 4):
        facts.ranks[0, rank.rank] = rank
    first, second = find_insights(facts, 0, {})
    assert first.text == (
        "`fc1.weight` (weight) differs on rank 2 since batch 2, and agreed in batch 1: not as on the 3 other ranks"
    )
    assert second.text == "`rotary.inv_freq` (buffer) differs on rank 3 since batch 0: not as on the 3 other ranks"
    assert (second.ranks, second.modules, second.since) == ([3], ["rotary"], 0)
