"""The verdict of ranks that a library has ended while they waited for others. Pure.

NCCL's watchdog and gloo end the process that waits, from a thread of their own, and not the one that it waits for
(killed_in_a_wait.py). What the main threads of all ranks stood in tells them apart: the aborted ones leave their stacks
(faulthandler), and those that torchrun stops are asked before it does (launcher/agent/last_looks.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from msgspec import structs

from ...core.codes import Certainty, VerdictKind
from ...core.recorder.group_table import members_of
from ...core.recorder.operation_mismatch import standing_at
from ...core.text import ranks_text
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import doing, first_line
from ..report.rank_states import signal_name
from ..report.sentence_parts import grouped
from ..report.verdict import Verdict
from .end_positions import STILL_S, looks_of
from .hang_finding import position_lines
from .hang_groups import LOOK_FOR_AN_IF, ODD_UNKNOWN, absent
from .hang_model import HangFinding, awaited_text, position_of
from .hang_verdict import verdict_of
from .killed_in_a_wait import WAITED_S, killed_in_a_wait, may_be_behind

_INIT = "init_process_group"
_Found = tuple[VerdictKind, HangFinding]


def abort_verdict(facts: RunFacts) -> Verdict | None:
    """None if no library ended a rank that seems to have waited, or if another rank ended for a reason of its own."""
    if not facts.failed_by_itself:
        return None
    ranks = facts.of_attempt(facts.last_attempt)
    aborted = killed_in_a_wait(ranks)
    others = [rank for rank in ranks if rank not in aborted]
    if not aborted or len(ranks) < max(2, facts.announced_ranks) or any(_has_own_reason(rank) for rank in others):
        return None
    scene = _AbortScene(aborted, others)
    kind, found = scene.did_not_come() or scene.left_early() or scene.elsewhere() or scene.unknown()
    found = replace(found, evidence=[*scene.lines(), *found.evidence])
    verdict = verdict_of(facts, found, ranks, {}, kind)
    return structs.replace(verdict, signal=scene.signals[0], cascade=verdict.cascade if found.ranks else [])


def missed_init_verdict(facts: RunFacts) -> Verdict | None:
    """Ranks that gave up in init_process_group(), and the others were elsewhere, before their first batch."""
    ranks = facts.of_attempt(facts.last_attempt)
    waited = [rank for rank in ranks if rank.error is not None and _INIT in rank.error.traceback]
    others = [rank for rank in ranks if rank not in waited]
    looks = {number: look for number, look in looks_of(others).items() if look.stack}
    if (
        len(ranks) < max(2, facts.announced_ranks)
        or not waited
        or not all(rank.error is not None and rank.error.peer_failure for rank in waited)
        or not others
        or len(looks) < len(others)
        or any(rank.error is not None or rank.exit is None or rank.exit.by != "torchrun" for rank in others)
        or any(look.where.batch >= 0 or any(_INIT in line.function for line in look.stack) for look in looks.values())
    ):
        return None
    away = sorted(looks)
    positions = {rank: position_of(looks[rank]) for rank in away}
    numbers = sorted(rank.rank for rank in waited)
    where, gave_up = "init_process_group", f"waited until {'its' if len(numbers) == 1 else 'their'} time was over"
    found = absent(away, where, numbers, gave_up, sure=False, positions=positions, ended=True)
    step = (
        f"Look at what {ranks_text(away)} did there. Where it must take that long, call init_process_group() before "
        "it, or give that more time: init_process_group(timeout=...)."
    )
    lines = [
        f"rank {rank.rank} raised {rank.error.error}: {first_line(rank.error.message)}" for rank in waited if rank.error
    ]
    return verdict_of(facts, replace(found, next=[step], evidence=lines), ranks, {}, VerdictKind.HANG)


def _has_own_reason(rank: RankFacts) -> bool:
    if rank.error is not None:
        return not rank.error.peer_failure
    return bool(rank.own_code) and not rank.was_aborted_at_exit and not rank.hid_a_peer_failure


class _AbortScene:
    """The ranks of an attempt as they stood at its end. `others` ended for no reason of their own."""

    def __init__(self, aborted: list[RankFacts], others: list[RankFacts]) -> None:
        self._ranks = [*aborted, *others]
        self._looks = looks_of(self._ranks)
        self._positions = {number: position_of(look) for number, look in self._looks.items()}
        self._aborted = sorted(rank.rank for rank in aborted)
        self._faulted = {rank.rank for rank in aborted if rank.was_faulted}
        self._names = {rank.rank: signal_name(-(rank.own_code or 0)) for rank in aborted}
        self.signals = sorted(set(self._names.values()))
        """That ended them."""
        self._waiting = [number for number in self._aborted if self._waits(number)]
        self._raised = [rank.rank for rank in others if rank.error is not None or rank.hid_a_peer_failure]
        self._left = [rank.rank for rank in others if rank.rank not in self._raised and rank.own_code == 0]
        self._stopped = [rank.rank for rank in others if rank.rank not in self._raised + self._left]

    def _waits(self, number: int) -> bool:
        look = self._looks.get(number)
        return look is not None and (self._positions[number].waiting or standing_at(look.groups) is not None)

    def _waited_long(self, number: int) -> bool:
        """A backward may be all computation, and a fault in it the rank's own, unless it has stood for long."""
        shown = self._positions[number].kind == "waits" or standing_at(self._looks[number].groups) is not None
        unsure = number in self._faulted and not shown
        return self._looks[number].still_s >= (STILL_S if unsure else WAITED_S)

    def did_not_come(self) -> _Found | None:
        """Ranks that ran, waited for nobody and were not ahead, while the aborted ones waited for long."""
        away = [number for number in self._stopped if self._is_away(number)]
        if not self._operations or not away or not any(map(self._waited_long, self._waiting)):
            return None
        waited = f"waited for {self._waited_s:.0f} s, until {self._ended_them}"
        found = absent(away, self._operations, self._waiting, waited, sure=False, positions=self._positions, ended=True)
        step = (
            f"Look at what {ranks_text(away)} did there. Where it must take that long, let all ranks do it, or give "
            "the process group more time: init_process_group(timeout=...)."
        )
        return VerdictKind.HANG, replace(found, next=[step])

    def _is_away(self, number: int) -> bool:
        """A rank without a stack may wait, too."""
        position = self._positions.get(number)
        return (
            position is not None
            and position.kind in ("away", "stopped")
            and standing_at(position.groups) is None
            and any(number in self._met_by(waiting) for waiting in self._waiting)
            and not any(self._is_ahead(number, waiting) for waiting in self._waiting)
        )

    def _met_by(self, waiting: int) -> Collection[int]:
        """The ranks of the group that a rank waits in; all of them where its table does not show it."""
        place = standing_at(self._looks[waiting].groups)
        return members_of(place[0].members, len(self._ranks)) if place is not None else self._looks

    def _is_ahead(self, number: int, waiting: int) -> bool:
        away, waits = self._looks[number], self._looks[waiting]
        return may_be_behind(waits, away) and not may_be_behind(away, waits)

    def left_early(self) -> _Found | None:
        """All others had ended well, while the aborted ones waited."""
        if not self._operations or not self._left or self._stopped or self._raised:
            return None
        waited = f"waited, until {self._ended_them}"
        line = self._positions[self._waiting[0]].line
        found = absent(self._left, self._operations, self._waiting, waited, sure=False, left=True, line=line)
        return VerdictKind.HANG, found

    def elsewhere(self) -> _Found | None:
        """All ranks waited, or have raised as their peers went away, and not at one line."""
        numbers = [rank.rank for rank in self._ranks]
        if self._left or any(not self._waits(number) for number in self._aborted + self._stopped):
            return None
        lines = {number: position.line for number, position in self._positions.items()}
        places = grouped(sorted(numbers), lambda number: lines.get(number, ""))
        if len(places) < 2 or "" in places:
            return None
        text = "; ".join(f"{ranks_text(ranks)} at {line}" for line, ranks in places.items())
        them = ranks_text(self._aborted)
        statement = f"The ranks were not in the same collective, and {self._signals_text} ended {them}: {text}."
        return VerdictKind.CRASH, HangFinding(f"{statement} {ODD_UNKNOWN}", Certainty.UNKNOWN, [], [LOOK_FOR_AN_IF])

    def unknown(self) -> _Found:
        """A rank was aborted in a collective, or by a thread beside its script's."""
        who = f"{ranks_text(self._aborted).capitalize()} {'were' if len(self._aborted) > 1 else 'was'}"
        place = doing(self._looks[self._aborted[0]]) if self._aborted[0] in self._looks else ""
        inside = " in a collective," if self._waiting == self._aborted and not self._faulted else ""
        statement = f"{who} ended by {self._signals_text}{inside} {place}: it is unknown which rank is at fault."
        step = "Look in the job's output for what the communication library printed before the rank ended."
        return VerdictKind.LOST, HangFinding(statement, Certainty.UNKNOWN, [], [step])

    def lines(self) -> list[str]:
        """Where each rank was, and how it ended."""
        lines = position_lines(self._positions, ended=True)
        for number in self._aborted:
            still = f", {self._looks[number].still_s:.0f} s after it had last moved" if number in self._looks else ""
            how = "killed" if number in self._faulted else "aborted"
            lines.append(f"rank {number} was {how} by {self._names[number]}{still}")
        for rank in self._ranks:
            if rank.error is not None:
                lines.append(f"rank {rank.rank} raised {rank.error.error}: {first_line(rank.error.message)}")
        return lines

    @property
    def _waited_s(self) -> float:
        return max((self._looks[number].still_s for number in self._waiting), default=0.0)

    @property
    def _operations(self) -> str:
        size = len(self._ranks)
        return " and ".join(sorted({awaited_text(self._positions[number], size) for number in self._waiting} - {""}))

    @property
    def _signals_text(self) -> str:
        return " and ".join(self.signals)

    @property
    def _ended_them(self) -> str:
        return f"{self._signals_text} ended {'them' if len(self._waiting) > 1 else 'it'}"
