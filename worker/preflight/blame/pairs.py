"""Finds who is to blame when the group over all nodes failed: which pairs of nodes to try next, and the verdict. Pure.

The same for the ranks of a job's only node.

A node that works with any other node is good. A pair of good nodes that fails is a bad link. A node is bad only if it
failed with every other node while others work together; until then it stays a suspect, as its partners could be the bad
ones. On the example of four nodes where 0 and 2 cannot talk:

    next_pairs([], nodes)                     -> (0, 1) ok, (2, 3) ok       every node works with one other: all good
    next_pairs(results, nodes)                -> (0, 2) failed, (1, 3) ok   0 and 2 are good, so it is the link
    next_pairs(results, nodes)                -> []
    blame(results, nodes, hosts)              -> the link between 0 and 2
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations

from ....core.codes import Code
from ....core.preflight import PreflightFinding, Subject
from ....core.text import ranks_text
from ..steps import PairResult
from .group_blame import INSIDE, failure, rank_failed, undecided_inside

Pair = tuple[int, int]

STAGE = "cross group"

ROUNDS = 9
"""The most rounds: enough to try every pair of up to ten nodes."""

PARTNERS = 8
"""A node is bad only if it failed with this many others, or with all others if there are fewer."""

GOOD_PARTNERS = 2
"""Within a node, a rank is bad if it failed with this many ranks that work with others: links are few there."""


def next_pairs(results: Collection[PairResult], nodes: Collection[int], good_partners: int = PARTNERS) -> list[Pair]:
    """The pairs to try in the next round, each node in at most one of them. Empty if more pairs would not help.

    Call it with all results so far, at most ROUNDS times. For ranks of one node, `good_partners` is GOOD_PARTNERS.
    """
    tried = _TriedNodes(results, nodes, good_partners)
    if tried.failed and not tried.suspects:
        return []
    order = {node: place for place, node in enumerate(sorted(nodes))}
    open_pairs = [pair for pair in combinations(sorted(nodes), 2) if tried.is_worth(pair)]
    open_pairs.sort(key=lambda pair: (_urgency(pair, tried), _turn(order[pair[0]], order[pair[1]], len(order)), pair))
    chosen: list[Pair] = []
    busy: set[int] = set()
    for a, b in open_pairs:
        if a not in busy and b not in busy:
            chosen.append((a, b))
            busy |= {a, b}
    return chosen


def blame(
    results: Collection[PairResult], nodes: Mapping[int, list[int]], hosts: Mapping[int, str]
) -> list[PreflightFinding]:
    """The verdict; never empty. `nodes` gives the ranks of each node, `hosts` its name."""
    tried = _TriedNodes(results, nodes)
    words = _PairSentences(tried, nodes, hosts)
    if not tried.failed:
        return [words.no_pair_failed()]
    if len(nodes) == 2:
        return [words.bad_link(*tried.failed)]
    if not tried.good:
        return [words.none_works()]
    bad = {node for node in tried.suspects if tried.is_bad(node)}
    unsure = tried.suspects - bad
    links = [pair for pair in sorted(tried.failed) if tried.good.issuperset(pair)]
    return [
        *(words.bad_node(node, bad) for node in sorted(bad)),
        *(words.bad_link(pair) for pair in links),
        *(words.suspect(node) for node in sorted(unsure)),
    ]


def blame_ranks(results: Collection[PairResult], hosts: Mapping[int, str], why: str) -> list[PreflightFinding]:
    """The verdict on the ranks of one node; never empty. `hosts`: that of each rank. `why`: why their group failed."""
    tried = _TriedNodes(results, hosts, GOOD_PARTNERS)
    bad = sorted(rank for rank in tried.suspects if tried.is_bad(rank)) if tried.good else []
    victims = [rank for rank in hosts if rank not in bad]
    good = ", ".join(f"{a} and {b}" for a, b in sorted(tried.passed)[:3])
    findings: list[PreflightFinding] = []
    for rank in bad:
        partners = tried.failed_with(rank)
        first = tried.details[min(rank, partners[0]), max(rank, partners[0])]
        said = (
            f"works with none of the {len(partners)} ranks that it was tried with ({ranks_text(partners)}: {first}), "
            f"while others work together ({good})"
        )
        findings.append(
            rank_failed(Code.RANK_FAILED_GROUP, INSIDE, rank, hosts[rank], said, victims=[] if findings else victims)
        )
    if findings:
        return findings
    if tried.failed:
        pairs = "these pairs fail: " + ", ".join(f"{a} and {b}" for a, b in sorted(tried.failed)[:8])
    else:
        pairs = f"each of the {len(tried.passed)} pairs tried works by itself"
    return [undecided_inside(victims, next(iter(hosts.values())), f"{why}; {pairs}")]


class _TriedNodes:
    """The conclusion from the results about each node."""

    def __init__(self, results: Collection[PairResult], nodes: Collection[int], good_partners: int = PARTNERS) -> None:
        self.count = len(nodes)
        self._good_partners = good_partners
        self.details = {_pair(result): result.detail for result in results}
        self.passed = {_pair(result) for result in results if result.ok}
        self.failed = {_pair(result) for result in results} - self.passed
        self.good = {node for pair in self.passed for node in pair}
        self.suspects = {node for pair in self.failed for node in pair} - self.good

    def failed_with(self, node: int) -> list[int]:
        """The partners with which it failed."""
        return sorted(sum(pair) - node for pair in self.failed if node in pair)

    def is_bad(self, node: int) -> bool:
        """Whether a suspect has failed with enough partners to exclude them as the cause."""
        partners = self.failed_with(node)
        return (
            len(partners) >= min(self.count - 1, PARTNERS)
            or len(self.good.intersection(partners)) >= self._good_partners
        )

    def is_worth(self, pair: Pair) -> bool:
        """Whether a pair is worth trying: for a suspect, or, while nothing has failed, for a link."""
        if pair in self.details:
            return False
        if not self.failed:
            return True
        return any(node in self.suspects and not self.is_bad(node) for node in pair)


def _pair(result: PairResult) -> Pair:
    return min(result.a, result.b), max(result.a, result.b)


def _urgency(pair: Pair, tried: _TriedNodes) -> int:
    """The order of the partners of a suspect: first a good node, then an unknown one, last another suspect."""
    if tried.good.intersection(pair):
        return 0
    return 2 if tried.suspects.issuperset(pair) else 1


def _turn(a: int, b: int, count: int) -> int:
    """The round in which two nodes meet in a round-robin schedule with the fewest rounds (circle method)."""
    last = count - 1 + count % 2  # with an odd number of nodes, the one paired with `last` waits
    if b == last:
        return 2 * a % last
    return (a + b) % last


@dataclass
class _PairSentences:
    """The findings that follow from the results."""

    _tried: _TriedNodes
    _ranks: Mapping[int, list[int]]
    _hosts: Mapping[int, str]

    def bad_node(self, node: int, bad: set[int]) -> PreflightFinding:
        failed_with = self._tried.failed_with(node)
        works = ", ".join(self._pair_text(pair) for pair in sorted(self._tried.passed)[:3])
        sentence = (
            f"node {self._name(node)} failed with each of the {len(failed_with)} other nodes that it was tried with "
            f"({self._names(failed_with)}; {self._why(node)}), while others work together ({works})"
        )
        next_ = f"Leave {self._name(node)} out of the next run, and look at its network interface, cable and firewall."
        return self._finding(Code.NODE_UNREACHABLE, "node", [node], sentence, next_, others_at_fault=bad)

    def bad_link(self, pair: Pair) -> PreflightFinding:
        link = f"the link between {self._pair_text(pair)} failed ({self._tried.details[pair]})"
        next_ = f"Look at the route, firewall and cables between {self._pair_text(pair)}."
        if self._tried.count > 2:
            return self._finding(
                Code.LINK_BROKEN, "link", [*pair], f"{link}, while each of the two works with another node", next_
            )
        sentence = f"{link}; node undetermined, as there is no third node to try them with"
        next_ += " With a third node in the run, the preflight can tell which of the two it is."
        return self._finding(Code.LINK_BROKEN, "link", [*pair], sentence, next_)

    def none_works(self) -> PreflightFinding:
        count = len(self._tried.failed)
        first = min(self._tried.failed)
        sentence = (
            f"none of the {count} pairs of nodes that were tried works ({self._pair_text(first)}: "
            f"{self._tried.details[first]}); node undetermined, as there is no good node to try the others with"
        )
        next_ = (
            "Check what the nodes share: the switch, a firewall, and whether NCCL_SOCKET_IFNAME or "
            "GLOO_SOCKET_IFNAME names an interface by which they reach each other."
        )
        return self._finding(Code.NO_PAIR_WORKS, "job", sorted(self._ranks), sentence, next_)

    def no_pair_failed(self) -> PreflightFinding:
        count = len(self._tried.passed)
        total = len(self._ranks) * (len(self._ranks) - 1) // 2
        which = f"all {count} pairs" if count == total else f"each of the {count} pairs tried, of {total},"
        sentence = f"the group of all {len(self._ranks)} nodes failed, but {which} of nodes work by themselves"
        if len(self._ranks) == 2:
            sentence = "the group of both nodes failed once, and worked when it was tried again"
        next_ = (
            "Run it again: if it fails again, look for what only all nodes together use up (ports, open files, memory)."
        )
        return self._finding(Code.ONLY_ALL_FAIL, "job", sorted(self._ranks), sentence, next_)

    def suspect(self, node: int) -> PreflightFinding:
        partners = self._tried.failed_with(node)
        sentence = (
            f"{self._name(node)} failed with {self._names(partners)} ({self._why(node)}) and was tried with no other; "
            f"node undetermined: it may be any of them, or the links between"
        )
        next_ = f"Run it again, or look at the network between {self._names([node, *partners])}."
        return self._finding(Code.LINK_BROKEN, "link", [node, *partners], sentence, next_)

    def _finding(
        self,
        code: Code,
        subject: Subject,
        nodes: list[int],
        sentence: str,
        next_: str,
        others_at_fault: Collection[int] = (),
    ) -> PreflightFinding:
        guilty = [*nodes, *others_at_fault]
        ranks = [rank for node in nodes for rank in self._ranks[node]]
        hosts = [self._hosts[node] for node in nodes]
        victims = sorted(rank for node, members in self._ranks.items() if node not in guilty for rank in members)
        return failure(code, STAGE, subject, ranks, hosts, sentence, next_, victims=victims)

    def _why(self, node: int) -> str:
        first = next(pair for pair in sorted(self._tried.failed) if node in pair)
        return self._tried.details[first]

    def _name(self, node: int) -> str:
        """The host, with the node's number if two nodes of the run are on one host."""
        host = self._hosts[node]
        return f"{host} (node {node})" if list(self._hosts.values()).count(host) > 1 else host

    def _names(self, nodes: list[int]) -> str:
        return ", ".join(map(self._name, nodes))

    def _pair_text(self, pair: Pair) -> str:
        return f"{self._name(pair[0])} and {self._name(pair[1])}"
