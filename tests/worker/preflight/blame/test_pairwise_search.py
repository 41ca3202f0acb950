"""Who is to blame, over any set of bad nodes and cut links: every verdict is right or says that it does not know."""

import re
from itertools import combinations

import pytest
from gpuwatch.worker.preflight.blame.pairs import GOOD_PARTNERS, ROUNDS, PairResult, blame, blame_ranks, next_pairs
from hypothesis import given
from hypothesis import strategies as st

RANKS_PER_NODE = 2


class Cluster:
    """Nodes of which some are bad and some links are cut; runs the rounds as the coordinators do."""

    def __init__(self, count, bad=(), cut=()):
        self.nodes = {node: [node * RANKS_PER_NODE + i for i in range(RANKS_PER_NODE)] for node in range(count)}
        self.hosts = {node: f"gpu-{node}" for node in range(count)}
        self.bad = set(bad)
        self.cut = {tuple(sorted(pair)) for pair in cut}
        self.rounds = []
        results = []
        while len(self.rounds) < ROUNDS and (pairs := next_pairs(results, self.nodes)):
            self.rounds.append(pairs)
            results += [PairResult(a, b, self.works(a, b), "all_reduce timed out") for a, b in pairs]
        self.findings = blame(results, self.nodes, self.hosts)

    def works(self, a, b):
        return not self.bad & {a, b} and (min(a, b), max(a, b)) not in self.cut

    def is_guilty(self, node):
        """It is bad, or it works with nobody at all though others do."""
        return not any(self.works(node, other) for other in self.nodes if other != node)

    @property
    def named(self):
        return [(finding.subject, finding.hosts) for finding in self.findings]


@st.composite
def clusters(draw):
    count = draw(st.integers(2, 9))
    bad = draw(st.sets(st.integers(0, count - 1)))
    cut = draw(st.sets(st.sampled_from(list(combinations(range(count), 2)))))
    return Cluster(count, bad, cut)


@pytest.mark.slow
@given(clusters())
def test_whatever_is_broken_no_innocent_node_and_no_sound_link_is_named(cluster):
    for finding in cluster.findings:
        ours = [node for node, host in cluster.hosts.items() if host in finding.hosts]
        if finding.subject == "node":
            assert all(map(cluster.is_guilty, ours))
            assert any(cluster.works(a, b) for a, b in combinations(cluster.nodes, 2))
        elif finding.subject == "link" and "undetermined" not in finding.sentence:
            assert tuple(ours) in cluster.cut
            assert not cluster.bad.intersection(ours)


@pytest.mark.slow
@given(clusters())
def test_the_rounds_end_and_nobody_is_asked_to_be_in_two_pairs_at_once(cluster):
    assert len(cluster.rounds) <= ROUNDS
    tried = [pair for pairs in cluster.rounds for pair in pairs]
    assert len(set(tried)) == len(tried)
    for pairs in cluster.rounds:
        members = [node for pair in pairs for node in pair]
        assert len(set(members)) == len(members)


@given(clusters())
def test_what_is_broken_is_never_overlooked(cluster):
    broken = [pair for pair in combinations(cluster.nodes, 2) if not cluster.works(*pair)]
    overlooked = any(
        "work by themselves" in finding.sentence or "tried again" in finding.sentence for finding in cluster.findings
    )
    assert overlooked == (not broken)


@given(clusters())
def test_guilty_and_victims_are_different_ranks(cluster):
    for finding in cluster.findings:
        assert finding.grade == "fail"
        assert finding.stage == "cross group"
        assert not set(finding.ranks) & set(finding.victims)
        assert set(finding.ranks) <= {rank for ranks in cluster.nodes.values() for rank in ranks}


@pytest.mark.parametrize("count", range(3, 10))
def test_one_bad_node_is_named(count):
    for bad in range(count):
        assert Cluster(count, bad=[bad]).named == [("node", [f"gpu-{bad}"])]


@pytest.mark.parametrize("count", range(3, 10))
def test_one_cut_link_is_named(count):
    for a, b in combinations(range(count), 2):
        assert Cluster(count, cut=[(a, b)]).named == [("link", [f"gpu-{a}", f"gpu-{b}"])]


@pytest.mark.parametrize("count", range(4, 10))
def test_a_link_of_the_first_round_takes_two_rounds(count):
    (first, *_) = Cluster(count).rounds[0]

    assert len(Cluster(count, cut=[first]).rounds) == 2


def test_everybody_else_is_a_victim_of_a_bad_node():
    (finding,) = Cluster(3, bad=[1]).findings

    assert finding.ranks == [2, 3]
    assert finding.victims == [0, 1, 4, 5]
    assert "failed with each of the 2 other nodes" in finding.sentence
    assert "gpu-0 and gpu-2" in finding.sentence


@pytest.mark.parametrize("faults", [{"bad": [0]}, {"bad": [1]}, {"cut": [(0, 1)]}, {"bad": [0, 1]}])
def test_of_two_nodes_neither_is_named(faults):
    (finding,) = Cluster(2, **faults).findings

    assert (finding.subject, finding.hosts) == ("link", ["gpu-0", "gpu-1"])
    assert "node undetermined" in finding.sentence
    assert "third node" in finding.next


def test_where_no_pair_works_no_node_is_named():
    (finding,) = Cluster(4, bad=range(4)).findings

    assert finding.subject == "job"
    assert "none of the 6 pairs" in finding.sentence
    assert "node undetermined" in finding.sentence


def test_a_failure_that_does_not_come_again_says_so():
    (finding,) = Cluster(2).findings

    assert "the group of both nodes failed once, and worked when it was tried again" in finding.sentence


def test_a_network_in_two_halves_is_no_fault_of_a_node():
    halves = [(a, b) for a in range(4) for b in range(4, 8)]

    assert all(finding.subject == "link" for finding in Cluster(8, cut=halves).findings)


def test_two_nodes_on_one_host_are_told_apart():
    findings = blame([PairResult(0, 1, False, "timed out")], {0: [0], 1: [1]}, {0: "box", 1: "box"})

    assert re.search(r"box \(node 0\) and box \(node 1\)", findings[0].sentence)


def test_a_cluster_too_large_for_all_pairs_says_how_many_were_tried():
    cluster = Cluster(40)

    assert len(cluster.rounds) == ROUNDS
    assert "each of the 180 pairs tried, of 780," in cluster.findings[0].sentence


def test_in_a_large_cluster_a_bad_node_is_named_within_the_rounds():
    assert Cluster(40, bad=[17]).named == [("node", ["gpu-17"])]


# -- the ranks of one node ------------------------------------------------------------------------------------------


def within_a_node(count, bad, cut=()):
    """(findings, rounds) of the only node of a job, whose group has failed."""
    hosts = dict.fromkeys(range(count), "gpu-0")
    results, rounds = [], 0
    while rounds < ROUNDS and (pairs := next_pairs(results, hosts, GOOD_PARTNERS)):
        rounds += 1
        results += [PairResult(a, b, not {a, b} & set(bad) and (a, b) not in cut, "timed out") for a, b in pairs]
    return blame_ranks(results, hosts, "no answer"), rounds


@given(st.integers(3, 10).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_a_bad_rank_is_named_if_two_good_ones_are_left_and_never_a_good_one(node):
    count, bad = node
    findings, _ = within_a_node(count, bad)
    named = {rank for finding in findings for rank in finding.ranks}
    assert named <= bad
    assert bool(named) == (bool(bad) and count - len(bad) >= 2)
    assert {rank for finding in findings for rank in finding.victims} == set(range(count)) - named
    assert bad or "each of the" in findings[0].sentence


@pytest.mark.parametrize("count", range(3, 17))
def test_one_bad_rank_takes_three_rounds_at_most(count):
    for bad in range(count):
        (found,), rounds = within_a_node(count, [bad])
        assert (found.subject, found.ranks, found.hosts) == ("rank", [bad], ["gpu-0"])
        assert f"rank {bad} (gpu-0) works with none of the 2 ranks that it was tried with" in found.sentence
        assert rounds <= 3


@pytest.mark.parametrize("count", range(4, 9))
def test_one_bad_link_names_no_rank(count):
    for pair in combinations(range(count), 2):
        (found,), _ = within_a_node(count, [], [pair])
        assert found.ranks == []
        assert f"the rank at fault is unknown: no answer; these pairs fail: {pair[0]} and {pair[1]}" in found.sentence
