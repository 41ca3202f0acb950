"""Who the others wait for, from what all ranks show of their process groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.events import GroupState
from ...core.recorder.group_table import RECENT
from ...core.text import ranks_text
from ...core.verdicts import Certainty
from .hang_model import (
    HangFinding,
    OperationMismatch,
    PendingOperation,
    group_text,
    kind_text,
    meetings_of,
    mismatch_of,
    standing_at,
)


@dataclass(frozen=True)
class RankGroups:
    """One rank, as far as this needs to know."""

    groups: Sequence[GroupState]
    kind: str
    """`waits`: for others. `may wait`: as far as can be seen. `away`: anything else, of its main thread; another thread
    may wait for others. `stopped`. `left`: it has ended with exit code 0. `unknown`: no stack could be had."""
    what: str = ""
    """What it does, in words."""
    failed: bool = False
    """It has ended, and where it has raised is where it waited."""


def find_by_groups(shown: Mapping[int, RankGroups], world_size: int, waited: str) -> HangFinding | None:
    """None if no rank stands in an operation that its own table shows, or if what they show leads to no sentence.

    `waited`: `have waited for 300 s`, `waited until they timed out`.
    """
    places = {
        rank: place
        for rank, one in shown.items()
        if one.kind in ("waits", "away", "unknown", "stopped")
        and (place := standing_at(one.groups, failed=one.failed)) is not None
    }
    tables = {rank: one.groups for rank, one in shown.items()}
    if not any(shown[rank].kind == "waits" for rank in places):
        return None
    mismatch = mismatch_of(tables, places, world_size)
    meetings = meetings_of(tables, places, world_size)
    if any(not meeting.members for meeting in meetings):
        return None
    if mismatch is not None:
        return _mismatch(mismatch, world_size)
    telling = _GroupSentences(shown, places, meetings, world_size, waited)
    return telling.stopped() or telling.did_not_come() or telling.swapped() or telling.all_came() or telling.unclear()


def one_too_many(waiting: Sequence[int]) -> str:
    """What else it may be where one rank waits for another that has left: they look the same."""
    return f" Or rank {waiting[0]} has issued one collective too many." if len(waiting) == 1 else ""


def _mismatch(found: OperationMismatch, world_size: int) -> HangFinding:
    odd = found.odd
    inside = group_text(found.group, found.members, world_size)
    parts = sorted(found.kinds.items(), key=lambda pair: (-len(pair[1]), pair[1]))
    evidence = [
        f"{ranks_text(sorted(ranks))} issued as collective {found.number}{inside}: {kind_text(kind)}"
        for kind, ranks in parts
    ]
    next_ = [
        "Every rank must issue the same collectives in the same order: look for one that is left out, or under an if."
    ]
    if not odd:
        statement = (
            f"The ranks do not issue the same collectives: as number {found.number}{inside}, "
            + ", ".join(f"{ranks_text(sorted(ranks))} issued {kind_text(kind)}" for kind, ranks in parts)
            + ". Which rank is the odd one is unknown."
        )
        return HangFinding(statement, Certainty.UNKNOWN, None, [], evidence, next_, "mismatch")
    theirs = " and ".join(kind_text(kind) for kind, ranks in parts[1:])
    statement = (
        f"{ranks_text(odd).capitalize()} issued {theirs}, where {len(parts[0][1])} other ranks issued "
        f"{kind_text(parts[0][0])}{inside}: the ranks do not issue the same collectives."
    )
    return HangFinding(
        statement,
        Certainty.SUPPORTED,
        odd[0] if len(odd) == 1 else None,
        odd if len(odd) > 1 else [],
        evidence,
        next_,
        "mismatch",
    )


@dataclass(frozen=True)
class _GroupSentences:
    """The sentences, tried one after the other."""

    shown: Mapping[int, RankGroups]
    places: Mapping[int, tuple[GroupState, int]]
    meetings: list[PendingOperation]
    world_size: int
    waited: str

    @property
    def _unseen(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.shown]

    @property
    def _unplaced(self) -> list[int]:
        """Ranks that wait for others, and in what their tables do not show: a backward, what C++ has issued."""
        return [
            rank
            for rank, one in sorted(self.shown.items())
            if one.kind in ("waits", "may wait") and rank not in self.places
        ]

    @property
    def _in_threads(self) -> bool:
        """Whether a rank waits for others in a thread, while its main thread does something else."""
        return any(self.shown[rank].kind == "away" for rank in self.places)

    def stopped(self) -> HangFinding | None:
        """A rank that was stopped in the middle of what the others wait in."""
        ranks = [rank for rank in self.places if self.shown[rank].kind == "stopped"]
        if len(ranks) != 1:
            return None
        meeting = next((one for one in self.meetings if ranks[0] in one.waiting and not one.missing), None)
        if meeting is None or len(meeting.waiting) < 2:
            return None
        others = [rank for rank in meeting.waiting if rank != ranks[0]]
        statement = (
            f"Rank {ranks[0]} is stopped in the middle of {meeting.text(self.world_size)}, in which "
            f"{self._wait_text(others)}. It is {self.shown[ranks[0]].what}."
        )
        next_ = ["Look at what has stopped it."]
        return HangFinding(statement, Certainty.ESTABLISHED, ranks[0], [], self._evidence(), next_)

    def did_not_come(self) -> HangFinding | None:
        """The ranks that wait for nobody and that others wait for, directly or over others."""
        absent = {rank for meeting in self.meetings for rank in meeting.missing} - self.places.keys()
        if self._unseen or not absent <= self.shown.keys():  # nothing was heard of one
            return None
        heads = {rank for rank in absent if self.shown[rank].kind not in ("waits", "may wait")}
        elsewhere = {rank for rank, one in self.shown.items() if one.kind in ("away", "unknown")} - self.places.keys()
        if not heads:
            return None
        meetings = [meeting for meeting in self.meetings if heads & set(meeting.missing)]
        meetings = [meeting for meeting in meetings if heads.issuperset(meeting.missing)] or meetings
        direct = sorted({rank for meeting in meetings for rank in meeting.waiting})
        ranks = sorted(heads)
        one = len(ranks) == 1
        first = self.shown[ranks[0]]
        left = all(self.shown[rank].kind == "left" for rank in ranks)
        sure = (
            one
            and not self._unplaced
            and elsewhere <= heads
            and first.kind != "unknown"
            and bool(first.groups)
            and not any(meeting.untold for meeting in self.meetings)
            and all(meeting.number > 0 for meeting in meetings)  # a receive may have been begun before
            and not (left and len(direct) < 2)  # of two, the other may have issued one too many
            and not self._in_threads
        )
        where = " and ".join(dict.fromkeys(self._name(meeting) for meeting in meetings))
        if left:
            statement = (
                f"{ranks_text(ranks).capitalize()} left early: {'its' if one else 'their'} script ended with exit code "
                f"0, while {self._wait_text(direct)} in {where}.{one_too_many(direct)}"
            )
            next_ = (
                "Every rank must issue the same collectives: look for a loop that is shorter on it, or an early return."
            )
        else:
            told = f" It is {first.what}." if one and first.what else ""
            statement = (
                f"{ranks_text(ranks).capitalize()} did not come to {where}, in which {self._wait_text(direct)}.{told}"
            )
            next_ = f"Look at the line where {ranks_text(ranks)} {'stands' if one else 'stand'}; all stacks are below."
        further = sorted(set(self.places) - set(direct))
        if further:
            statement += f" {ranks_text(further).capitalize()} {'waits' if len(further) == 1 else 'wait'} for those."
        return HangFinding(
            statement,
            Certainty.ESTABLISHED if sure else Certainty.SUPPORTED,
            ranks[0] if one else None,
            ranks if not one else [],
            self._evidence(),
            [next_],
            "left early" if left else "did not come",
        )

    def swapped(self) -> HangFinding | None:
        """All wait, each for ranks that wait elsewhere."""
        if self._unseen or not self._all_placed:
            return self._besides_what_is_not_shown()
        stuck = [meeting for meeting in self.meetings if meeting.missing]
        if not stuck or any(rank not in self.places for meeting in stuck for rank in meeting.missing):
            return None
        two = [meeting for meeting in stuck if meeting.number < 0]
        parts = sorted(stuck, key=lambda meeting: (-len(meeting.waiting), meeting.waiting))
        text = "; ".join(f"{self._in_text(meeting.waiting)} {meeting.text(self.world_size)}" for meeting in parts)
        odd = [rank for meeting in parts[1:] for rank in meeting.waiting]
        most = parts[0].waiting
        one = odd[0] if len(odd) == 1 and len(most) >= 2 and parts[0].missing == odd and not two else None
        one = None if self._in_threads else one
        if two:
            statement = f"The ranks wait for each other: {text}. A send and its receive do not match."
            next_ = "For each send there must be a receive on the other rank, and none of both may wait for the other."
        elif len({(meeting.group, meeting.members) for meeting in stuck}) > 1:
            statement = (
                f"The ranks wait for each other in different groups: {text}. They issue the collectives of these "
                "groups in different orders, or one of them has left one out."
            )
            next_ = "All ranks of two groups must issue the collectives of both in the same order."
        else:
            return None
        if one is not None:
            statement += f" Rank {one} is the only one that differs."
        certainty = Certainty.SUPPORTED if one is not None else Certainty.UNKNOWN
        return HangFinding(statement, certainty, one, [], self._evidence(), [next_], "order")

    def _besides_what_is_not_shown(self) -> HangFinding | None:
        """Some wait in a collective that their tables show, and the others in one that they do not, such as DDP's."""
        unplaced = self._unplaced
        if self._unseen or len(self.meetings) != 1 or not unplaced:
            return None
        meeting = self.meetings[0]
        if meeting.untold or len(meeting.members) != self.world_size or not self._are_elsewhere(unplaced, meeting):
            return None
        inside = meeting.text(self.world_size)
        if len(unplaced) == 1 and len(meeting.waiting) >= 2:
            odd, text = (
                unplaced[0],
                f"{self.shown[unplaced[0]].what}, where {len(meeting.waiting)} other ranks wait in {inside}",
            )
        elif len(meeting.waiting) == 1 and len(unplaced) >= 2:
            odd = meeting.waiting[0]
            text = f"in {inside}, where {len(unplaced)} other ranks are {self.shown[unplaced[0]].what}"
        elif len(meeting.waiting) == len(unplaced) == 1:
            return self._one_of_two(meeting, unplaced[0])
        else:
            return None
        return HangFinding(
            f"Rank {odd} waits {text}: the ranks do not issue the same collectives.",
            Certainty.SUPPORTED,
            odd,
            [],
            self._evidence(),
            ["Every rank must issue the same collectives in the same order: compare the lines below."],
            "mismatch",
        )

    def _one_of_two(self, meeting: PendingOperation, other: int) -> HangFinding:
        return HangFinding(
            f"The ranks do not issue the same collectives: {self._in_text(meeting.waiting)} "
            f"{meeting.text(self.world_size)}, and rank {other} is {self.shown[other].what}. Which rank is the odd one "
            "is unknown.",
            Certainty.UNKNOWN,
            None,
            [],
            self._evidence(),
            ["Every rank must issue the same collectives in the same order: compare the lines below."],
            "mismatch",
        )

    def _are_elsewhere(self, unplaced: list[int], meeting: PendingOperation) -> bool:
        """Whether these never began the meeting, or have begun what no table describes under its number."""
        if not set(meeting.missing) <= set(unplaced):
            return False
        came = [rank for rank in unplaced if rank not in meeting.missing]
        states = [group for rank in came for group in self.shown[rank].groups if group.name == meeting.group]
        return len(states) == len(came) and all(
            state.begun - meeting.number < RECENT and all(each.number != meeting.number for each in state.recent)
            for state in states
        )

    def all_came(self) -> HangFinding | None:
        """Nobody is missing where some stand, and all others wait for those."""
        complete = [meeting for meeting in self.meetings if not meeting.missing and not meeting.untold]
        if not complete or not self._all_placed or self._unseen:
            return None
        text = " and ".join(dict.fromkeys(meeting.text(self.world_size) for meeting in complete))
        ranks = sorted({rank for meeting in complete for rank in meeting.waiting})
        further = sorted(set(self.places) - set(ranks))
        everyone = "All ranks" if len(ranks) == self.world_size else f"All ranks that are needed ({ranks_text(ranks)})"
        statement = (
            f"{everyone} have come to {text}, with the same sizes and dtypes as far as they show them, and "
            f"{self.waited}: the network or a device does not bring it to an end."
        )
        if further:
            statement += f" {ranks_text(further).capitalize()} {'waits' if len(further) == 1 else 'wait'} for those."
        return HangFinding(
            statement, Certainty.UNKNOWN, None, [], self._evidence(), ["Test the links: gpuwatch check."], "all came"
        )

    def unclear(self) -> HangFinding | None:
        """All wait, and no other sentence is true of it."""
        if self._unseen or not self._all_placed:
            return None
        text = "; ".join(f"{self._in_text(one.waiting)} {one.text(self.world_size)}" for one in self.meetings)
        return HangFinding(
            f"All ranks wait: {text}. Which rank the others wait for is unknown.",
            Certainty.UNKNOWN,
            None,
            [],
            self._evidence(),
            ["Compare the lines where they stand."],
        )

    @property
    def _all_placed(self) -> bool:
        return all(rank in self.places for rank, one in self.shown.items() if one.kind != "left")

    def _wait_text(self, ranks: list[int]) -> str:
        waited = self.waited.replace("have", "has", 1) if len(ranks) == 1 else self.waited
        return f"{ranks_text(ranks)} {waited}"

    def _name(self, meeting: PendingOperation) -> str:
        """`all_reduce`, `the send of rank 1`"""
        if meeting.number < 0 and meeting.operation is not None:
            return f"the {meeting.operation.operation} of {ranks_text(meeting.waiting)}"
        return meeting.text(self.world_size)

    def _in_text(self, ranks: list[int]) -> str:
        return f"{ranks_text(ranks)} {'stands' if len(ranks) == 1 else 'stand'} in"

    def _evidence(self) -> list[str]:
        """`ranks 0, 2 have begun collective 9 and not ended it: all_reduce; rank 1 has begun none after 8`"""
        lines = []
        for meeting in self.meetings:
            if meeting.number < 0:
                continue
            line = f"{ranks_text(meeting.waiting)} {'has' if len(meeting.waiting) == 1 else 'have'} begun collective "
            line += f"{meeting.number} and not ended it: {meeting.text(self.world_size)}"
            begun = {rank: self._begun(rank, meeting) for rank in meeting.missing}
            for last in sorted(set(begun.values())):
                ranks = [rank for rank, number in begun.items() if number == last]
                what = f"none after {last}" if last else "none"
                line += f"; {ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} begun {what}"
            lines.append(line)
        return lines

    def _begun(self, rank: int, meeting: PendingOperation) -> int:
        return next((group.begun for group in self.shown[rank].groups if group.name == meeting.group), 0)
