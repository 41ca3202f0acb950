"""What each rank received in the collectives, and which rank must be wrong if they differ. Pure.

Example with three ranks: in all_gather, ranks 0 and 2 got wrong numbers from rank 1, and rank 1 got right numbers from
both. So rank 1 sends wrong numbers. If only rank 0 got them wrong, the cause is rank 0, rank 1 or the link between
them: undetermined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import msgspec

from ....core.text.ranks_text import ranks_text


class Vote(msgspec.Struct, frozen=True):
    """What one rank received. Ranks are global numbers."""

    sum_error: str = ""
    """How its all_reduce was wrong; "" if it was right."""
    gather_errors: list[int] = []
    """Ranks whose numbers it got wrong in all_gather. It is one of them if its own input has changed."""
    broadcast_errors: list[int] = []
    """Roots from which it got wrong numbers in broadcast."""
    barrier_error: str = ""


@dataclass(frozen=True)
class Judgement:
    """The ranks that are wrong; none if that is undetermined. `search`: sums of pairs would tell more."""

    sentence: str
    guilty: tuple[int, ...] = ()
    search: bool = False


def judge(votes: Mapping[int, Vote]) -> Judgement | None:
    """The verdict over all votes; None if nothing was wrong. Wrong transfers come first: they make sums wrong, too."""
    return (
        _judge_transfers(
            "all_gather", {(rank, sender) for rank in votes for sender in votes[rank].gather_errors}, votes
        )
        or _judge_transfers(
            "broadcast", {(rank, root) for rank in votes for root in votes[rank].broadcast_errors}, votes
        )
        or _judge_sums(votes)
        or _judge_barrier(votes)
    )


def judge_sums_of_pairs(votes: Mapping[int, Vote], bad: Collection[int]) -> Judgement:
    """The verdict over wrong sums once pairs have been tried; `bad` failed in every pair while others did not."""
    wrong = [rank for rank in sorted(votes) if votes[rank].sum_error]
    if bad:
        shown = next((rank for rank in sorted(bad) if votes[rank].sum_error), wrong[0])
        return Judgement(
            f"{ranks_text(bad)} {'adds' if len(bad) == 1 else 'add'} wrong: {votes[shown].sum_error}, in the whole "
            f"group and in every pair, while the other ranks add right with each other",
            tuple(sorted(bad)),
        )
    if len(wrong) == 1:
        return _wrong_alone(wrong[0], votes)
    return _sum_undetermined(wrong, votes, "pairs of ranks do not tell which rank adds wrong")


def _judge_transfers(kind: str, errors: set[tuple[int, int]], votes: Mapping[int, Vote]) -> Judgement | None:
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
        return Judgement(
            f"{ranks_text(sending)} {verb} wrong values in {kind} (seen by {ranks_text(sees)})", tuple(sorted(sending))
        )
    # all ranks get the same broadcast: a rank that alone got it wrong is the wrong one
    receiving = {
        to
        for to, of in senders.items()
        if (to, to) in errors
        or (others >= 2 and (len(of) * 2 > others or (kind == "broadcast" and not of & _of_others(to, senders))))
    }
    if receiving:
        verb = "gets" if len(receiving) == 1 else "get"
        return Judgement(
            f"{ranks_text(receiving)} {verb} wrong values in {kind} that the others get right", tuple(sorted(receiving))
        )
    to, of = min(errors)
    return Judgement(
        f"the values of rank {of} came out wrong at rank {to} in {kind}; undetermined whether rank {of}, rank {to} or "
        f"the way between them is at fault"
    )


def _of_others(rank: int, senders: Mapping[int, set[int]]) -> set[int]:
    return {sender for other, of in senders.items() if other != rank for sender in of}


def _judge_sums(votes: Mapping[int, Vote]) -> Judgement | None:
    wrong = [rank for rank in sorted(votes) if votes[rank].sum_error]
    if not wrong:
        return None
    found = _wrong_alone(wrong[0], votes) if len(wrong) == 1 else _sum_undetermined(wrong, votes)
    # a rank that adds wrong makes the sums of others wrong, too, so only pairs can tell; two ranks are one pair
    return replace(found, search=len(votes) > 2)


def _wrong_alone(rank: int, votes: Mapping[int, Vote]) -> Judgement:
    others = ranks_text(other for other in votes if other != rank)
    return Judgement(f"rank {rank} adds wrong: {votes[rank].sum_error}, while {others} got it right", (rank,))


def _sum_undetermined(wrong: list[int], votes: Mapping[int, Vote], why: str = "") -> Judgement:
    who = "all ranks" if len(wrong) == len(votes) else ranks_text(wrong)
    return Judgement(
        f"{votes[wrong[0]].sum_error}, at {who}, although every rank's own values arrive; undetermined which rank adds "
        f"wrong" + (f" ({why})" if why else "")
    )


def _judge_barrier(votes: Mapping[int, Vote]) -> Judgement | None:
    early = [rank for rank in sorted(votes) if votes[rank].barrier_error]
    if not early:
        return None
    return Judgement(
        f"{ranks_text(early)} came through the barrier too early: {votes[early[0]].barrier_error}", tuple(early)
    )
