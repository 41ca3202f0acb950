"""Decides which ranks are to blame when the test of one process group failed. Pure.

A rank is to blame if it died, found a fault of its own, or is accused by others. Within a node, a rank that hung while
the others gave up is also to blame. Between nodes it is not: the network can make a rank hang where torch's timeout has
no effect, for example while it connects. A rank whose peers ended, or that timed out, is a victim. If all ranks are
victims, no rank is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ....core.codes import Code
from ....core.preflight import PreflightFinding, Subject
from ....core.text import ranks_text
from ..steps import RankStepReport

INSIDE = "node group"


@dataclass(frozen=True)
class GroupBlame:
    """`findings` is empty if no rank can be blamed. `failed` is whether the group failed at all."""

    failed: bool
    findings: list[PreflightFinding] = field(default_factory=list)
    victims: dict[int, str] = field(default_factory=dict)
    """rank -> its report"""

    @property
    def detail(self) -> str:
        """The most frequent report of the victims."""
        most = Counter(self.victims.values()).most_common(1)
        return most[0][0] if most else ""


def failure(
    code: Code,
    stage: str,
    subject: Subject,
    ranks: list[int],
    hosts: list[str],
    sentence: str,
    next_: str,
    *,
    victims: list[int],
) -> PreflightFinding:
    """A finding that stops the job."""
    return PreflightFinding(stage, "fail", subject, ranks, hosts, sentence, next_, victims=victims, code=code)


def rank_failed(
    code: Code, stage: str, rank: int, host: str, said: str, next_: str = "", victims: Sequence[int] = ()
) -> PreflightFinding:
    """A finding that names one rank. `said` is the predicate of its sentence. `host`: "" if it is not known."""
    sentence = f"rank {rank}{f' ({host})' if host else ''} {said}"
    next_ = next_ or f"Look at {host or 'its host'}, or leave that node out of the next run."
    return failure(code, stage, "rank", [rank], [host] if host else [], sentence, next_, victims=sorted(victims))


def undecided_inside(ranks: list[int], host: str, why: str) -> PreflightFinding:
    """The finding of a node whose ranks do not work together, if none of them is known to be at fault."""
    sentence = f"{ranks_text(ranks)} inside node {host} do not work together; the rank at fault is unknown: {why}"
    next_ = f"Run `gpuwatch check --nnodes 1 --nccl-debug` on {host} alone, with fewer ranks, and read the log."
    return failure(Code.GROUP_UNDECIDED, INSIDE, "node", [], [host], sentence, next_, victims=ranks)


def judge_group(
    stage: str, members: Mapping[int, RankStepReport], hosts: Mapping[int, str], *, one_node: bool = False
) -> GroupBlame:
    """`members` are the reports of the ranks that were in the group."""
    bad = {rank: report for rank, report in members.items() if report.kind not in ("ok", "idle")}
    if not bad:
        return GroupBlame(False)
    reasons = _own_faults(bad) or _accused(bad) or (_hangs_alone(bad) if one_node else {})
    victims = {
        rank: f"{report.detail}{f' (at {report.said})' if report.said and report.said not in report.detail else ''}"
        for rank, report in bad.items()
        if rank not in reasons
    }
    findings = [
        rank_failed(
            Code.RANK_FAILED_GROUP,
            stage,
            rank,
            hosts.get(rank, ""),
            said,
            next_,
            victims=[] if number else list(victims),
        )
        for number, (rank, (said, next_)) in enumerate(sorted(reasons.items()))
    ]
    return GroupBlame(True, findings, victims)


def _own_faults(bad: Mapping[int, RankStepReport]) -> dict[int, tuple[str, str]]:
    """Ranks that died or report a fault of their own."""
    return {
        rank: (_failed_text(report), report.next)
        for rank, report in bad.items()
        if report.own or (report.kind == "died" and report.own is None)
    }


def _failed_text(report: RankStepReport) -> str:
    step = f" at {report.said}" if report.said and report.said not in report.detail else ""
    if report.kind == "died":
        return f"died{step}: {report.detail}"
    if report.kind == "hung":
        return report.detail
    return f"failed{step}: {report.detail}"


def _accused(bad: Mapping[int, RankStepReport]) -> dict[int, tuple[str, str]]:
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


def _hangs_alone(bad: Mapping[int, RankStepReport]) -> dict[int, tuple[str, str]]:
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


# The numbers that each rank received in the collectives, and which rank is wrong if they differ. Pure.
#
# Example with three ranks: in all_gather, ranks 0 and 2 got wrong numbers from rank 1, and rank 1 got right numbers
# from both. So rank 1 sends wrong numbers. If only rank 0 got them wrong, the cause is rank 0, rank 1 or the link
# between them: undetermined.


class RankVote(msgspec.Struct, frozen=True):
    """The numbers that one rank received. Ranks are global numbers."""

    sum_error: str = ""
    """How its all_reduce was wrong; "" if it was right."""
    gather_errors: list[int] = []
    """Ranks whose numbers it got wrong in all_gather. It is one of them if its own input has changed."""
    broadcast_errors: list[int] = []
    """Roots from which it got wrong numbers in broadcast."""
    barrier_error: str = ""


@dataclass(frozen=True)
class VoteResult:
    """The ranks that are wrong; none if that is undetermined. `search`: sums of pairs may determine it."""

    sentence: str
    guilty: tuple[int, ...] = ()
    search: bool = False


def judge(votes: Mapping[int, RankVote]) -> VoteResult | None:
    """The verdict over all votes; None if nothing was wrong. Wrong transfers come first: they make sums wrong, too."""
    gathers = {(rank, sender) for rank in votes for sender in votes[rank].gather_errors}
    broadcasts = {(rank, root) for rank in votes for root in votes[rank].broadcast_errors}
    found = _judge_transfers("all_gather", gathers, votes) or _judge_transfers("broadcast", broadcasts, votes)
    if found is not None:
        return found
    if any(vote.sum_error for vote in votes.values()):
        # a rank that adds wrong makes the sums of others wrong, too, so only pairs can tell; two ranks are one pair
        return replace(_judge_sums(votes), search=len(votes) > 2)
    early = [rank for rank in sorted(votes) if votes[rank].barrier_error]
    if not early:
        return None
    return VoteResult(f"{ranks_text(early)} left the barrier too early: {votes[early[0]].barrier_error}", tuple(early))


def judge_sums_of_pairs(votes: Mapping[int, RankVote], bad: Collection[int]) -> VoteResult:
    """The verdict over wrong sums once pairs have been tried; `bad` failed in every pair while others did not."""
    if bad:
        shown = next(rank for rank in (*sorted(bad), *sorted(votes)) if votes[rank].sum_error)
        return VoteResult(
            f"{ranks_text(bad)} {'computes' if len(bad) == 1 else 'compute'} wrong sums: {votes[shown].sum_error}, "
            "in the whole group and in every pair, while the other ranks compute right sums with each other",
            tuple(sorted(bad)),
        )
    return _judge_sums(votes, " (tests of pairs do not show which rank computes wrong sums)")


def _judge_transfers(kind: str, errors: set[tuple[int, int]], votes: Mapping[int, RankVote]) -> VoteResult | None:
    """The verdict from (receiver, sender) of every wrong transfer."""
    if not errors:
        return None
    others = len(votes) - 1
    receivers = {sender: {to for to, of in errors if of == sender and to != sender} for _, sender in errors}
    senders = {to: {of for at, of in errors if at == to and of != to} for to, _ in errors}
    sending = {
        sender
        for sender, to in receivers.items()
        if to and ((sender, sender) in errors or (others >= 2 and len(to) * 2 > others))
    }
    if sending:
        sees = max((receivers[sender] for sender in sending), key=len)
        verb = "sends" if len(sending) == 1 else "send"
        return VoteResult(
            f"{ranks_text(sending)} {verb} wrong values in {kind} (seen by {ranks_text(sees)})", tuple(sorted(sending))
        )
    # all ranks get the same broadcast: a rank that alone got it wrong is the wrong one
    receiving = {
        to
        for to, of in senders.items()
        if (to, to) in errors
        or (
            others >= 2
            and (len(of) * 2 > others or (kind == "broadcast" and all(receivers[each] <= {to} for each in of)))
        )
    }
    if receiving:
        verb = "gets" if len(receiving) == 1 else "get"
        return VoteResult(
            f"{ranks_text(receiving)} {verb} wrong values in {kind} that the others get right", tuple(sorted(receiving))
        )
    to, of = min(errors)
    return VoteResult(
        f"the values of rank {of} arrived wrong at rank {to} in {kind}; undetermined whether rank {of}, rank {to} or "
        f"the way between them is at fault"
    )


def _judge_sums(votes: Mapping[int, RankVote], why: str = "") -> VoteResult:
    wrong = [rank for rank in sorted(votes) if votes[rank].sum_error]
    error = votes[wrong[0]].sum_error
    if len(wrong) == 1:
        others = ranks_text(other for other in votes if other != wrong[0])
        return VoteResult(f"rank {wrong[0]} computes wrong sums: {error}, while {others} got it right", tuple(wrong))
    who = "all ranks" if len(wrong) == len(votes) else ranks_text(wrong)
    arrived = f"{error}, at {who}, although every rank's own values arrive"
    return VoteResult(f"{arrived}; undetermined which rank computes wrong sums{why}")
