"""Who the others wait for, from what all ranks show of their process groups: one list of rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...core.codes import Certainty
from ...core.events.rank_standing import GroupState
from ...core.recorder.group_table import RECENT
from ...core.recorder.operation_mismatch import OperationMismatch, mismatch_of, standing_at
from ...core.text import ranks_text
from ..report.sentence_parts import grouped
from .hang_model import BACKWARD, HangFinding, RankPosition
from .hang_places import IssuedPlaces, capital, lines_text, whereabouts, who_waits
from .pending_operations import PendingOperation, group_text, is_pending, kind_text, left_open, meetings_of

SAME_COLLECTIVES = "Every rank must issue the same collectives"
LOOK_FOR_AN_IF = f"{SAME_COLLECTIVES} in the same order: look for a call that only some of them make, as inside an if."
IN_ORDER = f"{SAME_COLLECTIVES} in the same order: compare the lines below."
COMPARE_LINES = "Compare the lines where the ranks are stuck."
ODD_UNKNOWN = "It is unknown which rank is the odd one."
_NOT_THE_SAME = "the ranks do not issue the same collectives"


def absent(
    ranks: list[int],
    where: str,
    waiting: list[int],
    waited: str,
    *,
    sure: bool,
    left: bool = False,
    positions: Mapping[int, RankPosition] | None = None,
    further: str = "",
    cause: str = "",
    line: str = "",
    ended: bool = False,
) -> HangFinding:
    """The finding where some wait for ranks that are elsewhere, or that have `left`.

    `positions`: what is known of where these are. `line`: where the first that waits does. `ended`: all of them have
    ended since.
    """
    instead: list[int] = []
    one, who = len(ranks) == 1, ranks_text(ranks)
    if left:
        how = f"{'its' if one else 'their'} script ended with exit code 0"
        statement = f"{who.capitalize()} left early: {how}, while {who_waits(waiting, waited)} in {where}."
        if len(waiting) == 1:  # they look the same
            instead = waiting
            statement += f" Or rank {waiting[0]} has issued one collective too many{f', at {line}' if line else ''}."
        next_ = f"{SAME_COLLECTIVES}: look for a loop that ends sooner on that rank, or an early return."
    else:
        missed = f"never reached {where}, in which {who_waits(waiting, waited)}."
        others = f", in which {ranks_text(waiting)}"
        statement = whereabouts(ranks, positions or {}, missed, others, ended=ended)
        now = f"Look at the line where {who} {'is' if one else 'are'}; the report has the stacks."
        next_ = f"Look at what {who} did then." if ended else now
    certainty = Certainty.ESTABLISHED if one and sure else Certainty.SUPPORTED
    return HangFinding(statement + further, certainty, ranks, [next_], cause=cause, instead=instead)


def find_by_groups(
    positions: Mapping[int, RankPosition], world_size: int, waited: str, *, over: bool = False
) -> HangFinding | None:
    """None if no rank stands in an operation that its own table shows, or if what they show leads to no sentence.

    `waited`: `have waited for 300 s`, `waited until they timed out`. `over`: all of them have ended since.
    """
    places = {
        rank: place
        for rank, one in positions.items()
        if one.kind in ("waits", "away", "unknown", "stopped")
        and (place := standing_at(one.groups, failed=one.failed)) is not None
    }
    tables = {rank: one.groups for rank, one in positions.items()}
    for rank, one in positions.items():
        if one.waiting and rank not in places and (place := left_open(one.groups, tables, world_size)) is not None:
            places[rank] = place
    if not any(
        positions[rank].kind == "waits" or is_pending(positions[rank].groups) or state.phase == "issued"
        for rank, (state, _) in places.items()
    ):
        return None
    meetings = meetings_of(tables, places, world_size)
    if any(not meeting.members for meeting in meetings):
        return None
    mismatch = mismatch_of(tables, places, world_size)
    if mismatch is not None:
        return _mismatch(mismatch, IssuedPlaces(positions, places, over), world_size)
    scene = _GroupScene(positions, places, meetings, world_size, waited, over)
    rules = (scene.stopped, scene.did_not_come, scene.swapped, scene.all_came, scene.unclear)
    found = next((found for rule in rules if (found := rule()) is not None), None)
    return replace(found, evidence=scene.evidence()) if found is not None else None


def _mismatch(found: OperationMismatch, issued_at: IssuedPlaces, world_size: int) -> HangFinding:
    inside = group_text(found.group, found.members, world_size)
    parts = sorted(found.kinds.items(), key=lambda pair: (-len(pair[1]), pair[1]))
    issued = [(ranks_text(sorted(ranks)), kind_text(kind)) for kind, ranks in parts]
    lines = [issued_at.text(found, kind, sorted(ranks)) for kind, ranks in parts]
    all_of_it = ", ".join(f"{who} issued {what}{at}" for (who, what), at in zip(issued, lines, strict=True))
    statement = (
        f"{all_of_it[:1].upper()}{all_of_it[1:]}, as collective {found.number}{inside}: {_NOT_THE_SAME}. {ODD_UNKNOWN}"
    )
    if found.odd:
        theirs = " and ".join(f"{what}{at}" for (_, what), at in zip(issued[1:], lines[1:], strict=True))
        where = f"{len(parts[0][1])} other ranks issued {issued[0][1]}{inside}{lines[0]}"
        statement = f"{ranks_text(found.odd).capitalize()} issued {theirs}, where {where}: {_NOT_THE_SAME}."
    return HangFinding(
        statement,
        Certainty.SUPPORTED if found.odd else Certainty.UNKNOWN,
        found.odd,
        [f"{SAME_COLLECTIVES} in the same order: look for one that is skipped, or inside an if."],
        [f"{who} issued as collective {found.number}{inside}: {what}" for who, what in issued],
        "mismatch",
    )


@dataclass(frozen=True)
class _GroupScene:
    positions: Mapping[int, RankPosition]
    places: Mapping[int, tuple[GroupState, int]]
    meetings: list[PendingOperation]
    world_size: int
    waited: str
    over: bool

    @property
    def _is_whole(self) -> bool:
        """Every rank was seen."""
        return all(rank in self.positions for rank in range(self.world_size))

    @property
    def _all_placed(self) -> bool:
        everyone = all(rank in self.places for rank, one in self.positions.items() if one.kind != "left")
        return everyone and self._is_whole

    @property
    def _unplaced(self) -> list[int]:
        """Ranks that wait for others, and in what their tables do not show: a backward, what C++ has issued."""
        return [rank for rank, one in sorted(self.positions.items()) if one.waiting and rank not in self.places]

    @property
    def _in_threads(self) -> bool:
        """Whether a rank waits for others in a thread, while its main thread does something else."""
        return any(
            self.positions[rank].kind == "away" and not state.pending for rank, (state, _) in self.places.items()
        )

    def stopped(self) -> HangFinding | None:
        """A rank that was stopped in the middle of what the others wait in."""
        ranks = [rank for rank in self.places if self.positions[rank].kind == "stopped"]
        if len(ranks) != 1:
            return None
        meeting = next((one for one in self.meetings if ranks[0] in one.waiting and not one.missing), None)
        if meeting is None or len(meeting.waiting) < 2:
            return None
        others = who_waits([rank for rank in meeting.waiting if rank != ranks[0]], self.waited)
        where = f"in the middle of {meeting.text(self.world_size)}, in which {others}"
        statement = f"Rank {ranks[0]} is stopped {where}. It is {self.positions[ranks[0]].what}."
        return HangFinding(statement, Certainty.ESTABLISHED, ranks, ["Find out why it was stopped."])

    def did_not_come(self) -> HangFinding | None:
        """The ranks that wait for nobody and that others wait for, directly or over others."""
        missing = {rank for meeting in self.meetings for rank in meeting.missing} - self.places.keys()
        if not self._is_whole or not missing <= self.positions.keys():  # nothing was heard of one
            return None
        heads = {rank for rank in missing if not self.positions[rank].waiting}
        away = {rank for rank, one in self.positions.items() if one.kind in ("away", "unknown")} - self.places.keys()
        if not heads:
            return None
        meetings = [meeting for meeting in self.meetings if heads & set(meeting.missing)]
        meetings = [meeting for meeting in meetings if heads.issuperset(meeting.missing)] or meetings
        direct = sorted({rank for meeting in meetings for rank in meeting.waiting})
        first = self.positions[min(heads)]
        left = all(self.positions[rank].kind == "left" for rank in heads)
        sure = (
            not self._unplaced
            and away <= heads
            and first.kind != "unknown"
            and bool(first.groups)
            and not any(meeting.untold for meeting in self.meetings)
            and all(meeting.number > 0 for meeting in meetings)  # a receive may have been begun before
            and not (left and len(direct) < 2)  # of two, the other may have issued one too many
            and not self._in_threads
            and all(self._is_counted(rank, meeting) for meeting in meetings for rank in heads & set(meeting.missing))
        )
        return absent(
            sorted(heads),
            " and ".join(dict.fromkeys(map(self._name, meetings))),
            direct,
            self.waited,
            sure=sure,
            left=left,
            positions=self.positions,
            line=self.positions[direct[0]].line if direct else "",
            further=self._further(direct),
            ended=self.over,
            cause="left early" if left else "did not come",
        )

    def _is_counted(self, rank: int, meeting: PendingOperation) -> bool:
        """Whether all that this rank has begun is known. C++ counts on by itself: torch's recorder has that, or what a
        rank leaves at its end."""
        if self.positions[rank].kind == "left" or not self.places[meeting.waiting[0]][0].pending:
            return True
        return any(group.name == meeting.group and group.pending is not None for group in self.positions[rank].groups)

    def _further(self, direct: list[int]) -> str:
        further = sorted(set(self.places) - set(direct))
        return f" {capital(further, 'waits', 'wait')} for those." if further else ""

    def swapped(self) -> HangFinding | None:
        """All wait, each for ranks that wait elsewhere."""
        if not self._all_placed:
            return self._besides_what_is_not_shown()
        stuck = [meeting for meeting in self.meetings if meeting.missing]
        if not stuck or any(rank not in self.places for meeting in stuck for rank in meeting.missing):
            return None
        two = any(meeting.number < 0 for meeting in stuck)
        parts = sorted(stuck, key=lambda meeting: (-len(meeting.waiting), meeting.waiting))
        text = "; ".join(map(self._stand_in, parts))
        odd = [rank for meeting in parts[1:] for rank in meeting.waiting]
        is_odd = len(odd) == 1 and len(parts[0].waiting) >= 2 and parts[0].missing == odd
        if not is_odd or two or self._in_threads:
            odd = []
        if two:
            statement = f"The ranks wait for each other: {text}. A send and its receive do not match."
            next_ = "For each send there must be a receive on the other rank, and neither may wait for the other."
        elif len({(meeting.group, meeting.members) for meeting in stuck}) > 1:
            why = "They issue the collectives of these groups in different orders, or one of them has skipped one."
            statement = f"The ranks wait for each other in different groups: {text}. {why}"
            next_ = "All ranks of two groups must issue the collectives of both in the same order."
        else:
            return None
        statement += f" Rank {odd[0]} is the only one that differs." if odd else ""
        certainty = Certainty.SUPPORTED if odd else Certainty.UNKNOWN
        return HangFinding(statement, certainty, odd, [next_], cause="order")

    def _besides_what_is_not_shown(self) -> HangFinding | None:
        """Some wait in a collective that their tables show, and the others in one that they do not, such as DDP's."""
        unplaced = self._unplaced
        if not self._is_whole or len(self.meetings) != 1 or not unplaced:
            return None
        meeting = self.meetings[0]
        if meeting.untold or len(meeting.members) != self.world_size or not self._are_elsewhere(unplaced, meeting):
            return None
        inside, at = meeting.text(self.world_size), lines_text(meeting.waiting, self.positions)
        theirs = f"{self.positions[unplaced[0]].what}{lines_text(unplaced, self.positions)}"
        odd: list[int] = []
        if len(unplaced) == 1 and len(meeting.waiting) >= 2:
            odd, text = unplaced, f"{theirs}, where {len(meeting.waiting)} other ranks wait in {inside}{at}"
        elif len(meeting.waiting) == 1 and len(unplaced) >= 2:
            odd, text = meeting.waiting, f"in {inside}{at}, where {len(unplaced)} other ranks are {theirs}"
        elif len(meeting.waiting) != 1 or len(unplaced) != 1:
            return None
        both = f"{self._stand_in(meeting)}, and rank {unplaced[0]} is {theirs}"
        statement = f"{_NOT_THE_SAME.capitalize()}: {both}. {ODD_UNKNOWN}"
        if odd:
            statement = f"Rank {odd[0]} waits {text}: {_NOT_THE_SAME}."
        certainty = Certainty.SUPPORTED if odd else Certainty.UNKNOWN
        return HangFinding(statement, certainty, odd, [IN_ORDER], cause="mismatch")

    def _are_elsewhere(self, unplaced: list[int], meeting: PendingOperation) -> bool:
        """Whether these never began the meeting, or have begun what no table describes under its number."""
        if not set(meeting.missing) <= set(unplaced):
            return False
        came = [rank for rank in unplaced if rank not in meeting.missing]
        states = [group for rank in came for group in self.positions[rank].groups if group.name == meeting.group]
        return len(states) == len(came) and all(
            state.begun - meeting.number < RECENT and all(each.number != meeting.number for each in state.recent)
            for state in states
        )

    def all_came(self) -> HangFinding | None:
        """Nobody is missing where some stand, and all others wait for those."""
        complete = [meeting for meeting in self.meetings if not meeting.missing and not meeting.untold]
        if not complete or not self._all_placed:
            return None
        text = " and ".join(dict.fromkeys(meeting.text(self.world_size) for meeting in complete))
        ranks = sorted({rank for meeting in complete for rank in meeting.waiting})
        everyone = "All ranks" if len(ranks) == self.world_size else f"All ranks that are needed ({ranks_text(ranks)})"
        alike = "with the same sizes and dtypes as far as they show them"
        why = f"the network or a device does not complete it.{self._further(ranks)}"
        statement = f"{everyone} have reached {text}, {alike}, and {self.waited}: {why}"
        next_ = ["Test the links: gpuwatch check."]
        return HangFinding(statement, Certainty.UNKNOWN, [], next_, cause="all came")

    def unclear(self) -> HangFinding | None:
        """All wait, and no other sentence is true of it."""
        if not self._all_placed:
            return None
        text = "; ".join(map(self._stand_in, self.meetings))
        statement = f"All ranks wait: {text}. It is unknown which rank the others wait for."
        return HangFinding(statement, Certainty.UNKNOWN, [], [COMPARE_LINES])

    def _name(self, meeting: PendingOperation) -> str:
        """`all_reduce`, `the send of rank 1`"""
        if meeting.number < 0 and meeting.operation is not None:
            return f"the {meeting.operation.operation} of {ranks_text(meeting.waiting)}"
        by_torch = all(self.places[rank][0].phase == "issued" for rank in meeting.waiting)
        if by_torch and all(self.positions[rank].operation == BACKWARD for rank in meeting.waiting):
            return BACKWARD
        return meeting.text(self.world_size)

    def _stand_in(self, meeting: PendingOperation) -> str:
        """`ranks 0, 2 wait in all_reduce at train.py:41`"""
        verb = "waits" if len(meeting.waiting) == 1 else "wait"
        at = lines_text(meeting.waiting, self.positions)
        return f"{ranks_text(meeting.waiting)} {verb} in {meeting.text(self.world_size)}{at}"

    def evidence(self) -> list[str]:
        """`ranks 0, 2 have begun collective 9 and not ended it: all_reduce; rank 1 has begun none after 8`"""

        def begun(rank: int) -> int:
            return next((group.begun for group in self.positions[rank].groups if group.name == meeting.group), 0)

        lines = []
        for meeting in (meeting for meeting in self.meetings if meeting.number >= 0):
            line = f"{_have(meeting.waiting)} begun collective {meeting.number} and not finished it: "
            line += meeting.text(self.world_size)
            for last, ranks in sorted(grouped(meeting.missing, begun).items()):
                line += f"; {_have(ranks)} begun {f'none after {last}' if last else 'none'}"
            lines.append(line)
        return lines


def _have(ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'}"
