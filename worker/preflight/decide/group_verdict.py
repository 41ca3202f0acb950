"""Decides which ranks are to blame when the test of one process group failed. Pure.

A rank is to blame if it died, found a fault of its own, or is accused by others. Within a node, a rank that hung while
the others gave up is also to blame. Between nodes it is not: the network can make a rank hang where torch's timeout has
no effect, for example while it connects. A rank whose peers ended, or that timed out, is a victim. If all ranks are
victims, nobody is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ....core.preflight import Finding
from ....core.text.ranks_text import ranks_text
from ..reports import Report


@dataclass(frozen=True)
class Judgement:
    """`findings` is empty if nobody can be blamed. `failed` is whether the group failed at all."""

    failed: bool
    findings: list[Finding] = field(default_factory=list)
    victims: dict[int, str] = field(default_factory=dict)
    """rank -> what it reported"""

    @property
    def detail(self) -> str:
        """The most frequent report of the victims."""
        most = Counter(self.victims.values()).most_common(1)
        return most[0][0] if most else ""


def rank_failed(stage: str, rank: int, host: str, said: str, next_: str = "", victims: Sequence[int] = ()) -> Finding:
    """A finding that names one rank. `said` is the predicate of its sentence. `host`: "" if it is not known."""
    return Finding(
        stage=stage,
        grade="fail",
        subject="rank",
        ranks=[rank],
        hosts=[host] if host else [],
        sentence=f"rank {rank}{f' ({host})' if host else ''} {said}",
        next=next_ or f"Look at {host or 'its host'}, or leave that node out of the next run.",
        victims=sorted(victims),
    )


def judge_group(
    stage: str, members: Mapping[int, Report], hosts: Mapping[int, str], *, one_node: bool = False
) -> Judgement:
    """`members` are the reports of the ranks that were in the group."""
    bad = {rank: report for rank, report in members.items() if report.kind not in ("ok", "idle")}
    if not bad:
        return Judgement(False)
    reasons = _own_faults(bad) or _accused(bad) or (_hangs_alone(bad) if one_node else {})
    victims = {rank: _seen(report) for rank, report in bad.items() if rank not in reasons}
    findings = [
        rank_failed(stage, rank, hosts.get(rank, ""), said, next_, victims=[] if number else list(victims))
        for number, (rank, (said, next_)) in enumerate(sorted(reasons.items()))
    ]
    return Judgement(True, findings, victims)


def _own_faults(bad: Mapping[int, Report]) -> dict[int, tuple[str, str]]:
    """Ranks that died or report a fault of their own."""
    return {
        rank: (_failed_text(report), report.next)
        for rank, report in bad.items()
        if report.own or (report.kind == "died" and report.own is None)
    }


def _failed_text(report: Report) -> str:
    step = f" at {report.said}" if report.said and report.said not in report.detail else ""
    if report.kind == "died":
        return f"died{step}: {report.detail}"
    if report.kind == "hung":
        return report.detail
    return f"failed{step}: {report.detail}"


def _accused(bad: Mapping[int, Report]) -> dict[int, tuple[str, str]]:
    """Ranks accused by more ranks than they accuse themselves. Two ranks that accuse each other are undecided."""
    accusers: dict[int, list[int]] = {}
    for rank, report in bad.items():
        for peer in report.peers:
            if peer != rank:
                accusers.setdefault(peer, []).append(rank)
    accused = {}
    for peer, by in accusers.items():
        counter = bad[peer].peers if peer in bad else []
        if len([rank for rank in by if rank not in counter]) or len(by) > len(counter):
            first = bad[by[0]]
            accused[peer] = (f"is to blame, say {ranks_text(by)}: {first.detail}", first.next)
    return accused


def _hangs_alone(bad: Mapping[int, Report]) -> dict[int, tuple[str, str]]:
    """Ranks that had to be killed while others were not: torch's own, shorter timeout did not end them."""
    hung = {rank: report for rank, report in bad.items() if report.kind == "hung"}
    if len(hung) == len(bad):
        steps = Counter(report.said for report in hung.values())
        if len(steps) < 2:
            return {}
        # most ranks wait at the step that most have reached, for those that have not reached it
        most = steps.most_common(2)
        if most[0][1] == most[1][1]:
            return {}
        hung = {rank: report for rank, report in hung.items() if report.said != most[0][0]}
    return {rank: (report.detail, report.next) for rank, report in hung.items()}


def _seen(report: Report) -> str:
    return f"{report.detail}{f' (at {report.said})' if report.said and report.said not in report.detail else ''}"
