"""The ranks that the others wait for, from all ranks' positions. Pure, and the same live and in the report.

The ranks' tables of their process groups come first (hang_groups.py), then their stacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from ...core.codes import Certainty
from ...core.events.agent_events import RankLook, WorkerExit
from ...core.recorder.operation_mismatch import standing_at
from ...core.settings import OnHang
from ...core.text import ranks_text
from ..report.sentence_parts import grouped
from .hang_groups import COMPARE_LINES, IN_ORDER, ODD_UNKNOWN, absent, find_by_groups
from .hang_model import (
    BACKWARD,
    DEVICE,
    MESSAGE,
    QUIET,
    HangFinding,
    HangPrognosis,
    RankPosition,
    awaited_text,
    computes,
    has_left,
    operation_on_record,
    position_of,
)
from .hang_places import capital, lines_text, who_waits
from .pending_operations import with_pending


def find_hang(
    looks: Sequence[RankLook], ended: Mapping[int, WorkerExit], world_size: int, *, over: bool = False
) -> HangFinding | None:
    """The hang, and who is at fault. None if it is no hang:

    - no rank has answered, or all that have are stopped by a signal or a debugger, and no other rank has failed;
    - no rank waits, and one computes: an import, a compilation or a search moves nothing in the recorder.

    `ended` are the ranks of that attempt that have ended, with how they did. `world_size` is how many ranks there are.
    `over`: all of them have ended since they were asked.
    """
    gone = {
        look.where.rank: WorkerExit(look.where, 0, "itself", groups=look.groups) for look in looks if has_left(look)
    }
    ended = {**gone, **ended}
    left_tables = {rank: exit_.groups for rank, exit_ in ended.items()}
    tables = with_pending({**{look.where.rank: look.groups for look in looks}, **left_tables}, world_size)
    looks = [structs.replace(look, groups=list(tables[look.where.rank])) for look in looks]
    looks = sorted((look for look in looks if look.where.rank not in gone), key=lambda look: look.where.rank)
    positions = {look.where.rank: position_of(look) for look in looks}
    has_failed = any(exit_.code != 0 for exit_ in ended.values())
    if all(position.kind == "stopped" for position in positions.values()) and not (positions and has_failed):
        return None
    left = sorted(rank for rank, exit_ in ended.items() if exit_.code == 0)
    scene = _StackScene(looks, positions, left, world_size, world_size - len(positions) - len(ended), over)
    found = None
    if all(look.phase in ("finished", "raised") for look in looks):
        found = scene.does_not_end()
    elif len(left) == len(ended):
        exits = {rank: RankPosition("left", groups=exit_.groups) for rank, exit_ in ended.items()}
        found = find_by_groups({**positions, **exits}, world_size, scene.waited, over=over)
    found = found or scene.find()
    if found is None:
        return None
    outlook = _outlook_of(found, positions, looks, scene.unseen)
    return replace(found, evidence=[*scene.lines(), *found.evidence], outlook=outlook)


def missed_reduction(positions: Mapping[int, RankPosition], waiting: list[int], waited: str) -> HangFinding:
    """Some had waited in a backward's reduction, which no table describes, and all others were away."""
    away = [rank for rank, position in positions.items() if position.kind == "away"]
    found = absent(away, BACKWARD, waiting, waited, sure=False, positions=positions, ended=True)
    lines = " To see the lines, have the stall reported while it lasts: set --hang-timeout below the group's timeout."
    lines = "" if all(positions[rank].line for rank in away) else lines
    evidence = [f"{ranks_text([rank])} was {positions[rank].what}" for rank in away]
    return replace(found, next=[f"Look at what {ranks_text(away)} did then.{lines}"], evidence=evidence)


_UNSEEN = "{} of the ranks did not report their positions"


@dataclass(frozen=True)
class _StackScene:
    looks: Sequence[RankLook]
    positions: Mapping[int, RankPosition]
    left: list[int]
    """The ranks that have ended with exit code 0."""
    world_size: int
    unseen: int
    """Number of ranks whose position is unknown."""
    over: bool = False

    @property
    def _still_s(self) -> float:
        return min(look.still_s for look in self.looks)

    @property
    def waited(self) -> str:
        """Without a time where they have just moved: into a group's timeout, while they were asked."""
        return ("" if self.over else "have ") + "waited" + (f" for {self._still_s:.0f} s" if self._still_s >= 1 else "")

    def find(self) -> HangFinding | None:
        waiting = [rank for rank, position in self.positions.items() if position.waiting]
        away = [rank for rank, position in self.positions.items() if not position.waiting]
        # a rank that has raised lost another one: it is in it only if all of them have
        raised = {look.where.rank for look in self.looks if look.phase == "raised"}
        away = [rank for rank in away if rank not in raised] or away
        certain = self.unseen <= 0 and all(self.positions[rank].kind == "waits" for rank in waiting)
        if waiting and self.left and not away:
            where, sure = self._operations(waiting), certain and len(waiting) > 1
            return absent(self.left, where, waiting, self.waited, sure=sure, left=True)
        if waiting and away:
            sure = certain and all(self.positions[rank].kind != "unknown" for rank in away)
            where = self._operations(waiting)
            return absent(away, where, waiting, self.waited, sure=sure, positions=self.positions, ended=self.over)
        if stopped := self._stopped(raised):  # one that has raised may compute while it leaves
            return self._is_stopped(stopped)
        if away and any(computes(look) for look in self.looks):
            return None
        if len(self.looks) == 1 and len(self.left) == self.world_size - 1 > 0 and away:
            return self._last_one(away[0])
        return self._nobody_waits(away) if away else self._all_wait(waiting)

    def _stopped(self, raised: Collection[int]) -> list[int]:
        """The ranks that a signal has stopped, if all others have lost a peer or ended; [] if a debugger has one."""
        stopped = [look.where.rank for look in self.looks if look.state == "T"]
        return stopped if len(stopped) == len(self.positions.keys() - raised) else []

    def _is_stopped(self, stopped: list[int]) -> HangFinding:
        """Linux has them stopped: that needs no answer of theirs. The others have waited for them, and given up."""
        one = len(stopped) == 1
        it, them, its = ("it", "it", "its") if one else ("they", "them", "their")
        doing = f", {self.positions[stopped[0]].doing}" if one else ""
        statement = (
            f"{capital(stopped, 'is', 'are')} stopped (by SIGSTOP or Ctrl-Z){doing}: {it} can do nothing until "
            f"SIGCONT, and no other rank goes on without {them}."
        )
        next_ = [f"Look for who stopped {them}; kill -CONT with {its} process id lets {them} go on."]
        return HangFinding(statement, Certainty.SUPPORTED, stopped, next_, cause="stopped")

    def does_not_end(self) -> HangFinding:
        """Their scripts have ended or raised: they are held by an exit function, a thread or a destructor."""
        ranks, lines = list(self.positions), [position.line for position in self.positions.values()]
        raised = all(look.phase == "raised" for look in self.looks)
        why = f"since {'its' if len(ranks) == 1 else 'their'} script {'raised' if raised else 'ended'}"
        line = f" It is at {lines[0]}." if len(ranks) == 1 and lines[0] else ""
        statement = f"{capital(ranks, 'has', 'have')} not exited for {self._still_s:.0f} s {why}.{line}"
        next_ = ["Look for a non-daemon thread, a child process, or an atexit function."]
        return HangFinding(statement, Certainty.ESTABLISHED, ranks, next_, cause="does not end", may_end=raised)

    def _last_one(self, rank: int) -> HangFinding:
        position = self.positions[rank]
        still = f"Rank {rank} has not moved for {self._still_s:.0f} s, and all other ranks have ended."
        certainty = Certainty.SUPPORTED if position.kind == "unknown" else Certainty.ESTABLISHED
        next_ = [f"Look at the line where rank {rank} is."]
        return HangFinding(f"{still} It is {position.what}.", certainty, [rank], next_)

    def _nobody_waits(self, away: list[int]) -> HangFinding:
        if self.world_size == 1:
            statement = f"Rank 0 has not moved for {self._still_s:.0f} s. It is {self.positions[away[0]].what}."
            next_ = ["Look at the line where it is."]
            return HangFinding(statement, Certainty.ESTABLISHED, [0], next_, may_end=False)
        cause = "none waits in a collective: it is unknown which rank is the cause"
        statement = f"No rank has moved for {self._still_s:.0f} s, and {cause}."
        return HangFinding(statement, Certainty.UNKNOWN, [], ["Look at the lines where the ranks are."], may_end=False)

    def _all_wait(self, waiting: list[int]) -> HangFinding:
        operations = Counter(self.positions[rank].operation for rank in waiting)
        most, number = operations.most_common(1)[0]
        odd = [rank for rank in waiting if self.positions[rank].operation != most]
        inside = self._operations(waiting)
        next_ = COMPARE_LINES
        if self.unseen > 0:
            who, unseen = who_waits(waiting, self.waited).capitalize(), _UNSEEN.format(self.unseen)
            lost = "one of those never reached it, or the link to its node is lost"
            statement = f"{who} in {inside}, and {unseen}: {lost}."
            next_ = "Look at the nodes that did not report."
        elif DEVICE in operations:
            there = ranks_text([rank for rank in waiting if self.positions[rank].operation == DEVICE])
            statement = f"All ranks wait, and {there} in {DEVICE}: gpuwatch cannot see in which collective a GPU is."
        elif odd and 2 * number > len(waiting) and operations.keys().isdisjoint(("wait", BACKWARD, MESSAGE)):
            others = lines_text([rank for rank in waiting if rank not in odd], self.positions)
            theirs = f"{self._operations(odd)}{lines_text(odd, self.positions)}"
            where = f"in {theirs}, where {number} other ranks wait in {most}{others}"
            statement = f"{capital(odd, 'waits', 'wait')} {where}: the ranks do not issue the same collectives."
            return HangFinding(statement, Certainty.SUPPORTED, odd, [IN_ORDER])
        elif odd:
            why = "the ranks do not issue the same collectives, or wait for one in different ways"
            alike = grouped(waiting, lambda rank: awaited_text(self.positions[rank], self.world_size))
            each = (f"{ranks_text(r)} in {what}{lines_text(r, self.positions)}" for what, r in sorted(alike.items()))
            statement = f"All ranks wait, but not in the same operation ({', '.join(each)}): {why}. {ODD_UNKNOWN}"
        else:
            why = "no rank is missing, so their sizes or dtypes differ, or the network or a device does not complete it"
            reached = f"All {len(waiting)} ranks have reached {most}{lines_text(waiting, self.positions)}"
            statement = f"{reached}, and none has moved for {self._still_s:.0f} s: {why}."
            next_ = "Compare the lines where the ranks are stuck; if they are the same, test the links: gpuwatch check."
        return HangFinding(statement, Certainty.UNKNOWN, [], [next_])

    def _operations(self, ranks: list[int]) -> str:
        return " and ".join(sorted({awaited_text(self.positions[rank], self.world_size) for rank in ranks}))

    def lines(self) -> list[str]:
        """Where the ranks are, and how many are not among them."""
        return [
            *position_lines(self.positions, ended=self.over),
            *([_UNSEEN.format(self.unseen)] if self.unseen > 0 else []),
        ]


def position_lines(positions: Mapping[int, RankPosition], *, ended: bool = False) -> list[str]:
    """A line for all ranks that are alike. `ended`: they are not there any more."""
    alike = grouped(positions.items(), lambda pair: (pair[1].kind, pair[1].operation, pair[1].line))
    return [position_line([rank for rank, _ in found], found[0][1], ended=ended) for found in alike.values()]


_VERBS = {  # what one does, several do, and all did
    "is": ("is", "are", "was", "were"),
    "waits": ("waits", "wait", "waited", "waited"),
    "seems to wait": ("seems to wait", "seem to wait", "seemed to wait", "seemed to wait"),
}


def position_line(ranks: list[int], first: RankPosition, *, ended: bool = False) -> str:
    """`ranks 0-2 wait in all_reduce: train.py:41 in main: dist.all_reduce(loss)`; `ended`: waited"""
    form = (len(ranks) > 1) + 2 * ended
    what = f"{_VERBS['is'][form]} {'stopped, ' if first.kind == 'stopped' else ''}{first.doing}"
    if first.waiting:
        what = f"{_VERBS['waits' if first.kind == 'waits' else 'seems to wait'][form]} in {first.operation}"
        if first.operation == DEVICE and (name := operation_on_record(first.groups)):
            what += f", which is in {name}"
    elif first.kind == "unknown":
        what += "; no stack could be read"
    return f"{ranks_text(ranks)} {what}" + (f": {first.line}" if first.line else "")


# Whether a job that stands still can go on by itself. Pure.
#
# A rank that stands in code of its own may work there: it downloads, asks a licence server, waits for a file system or
# for somebody who types, or its child processes compute. From outside that looks like a rank that never comes. So a job
# is stuck for certain only if no rank stands in code of its own.

_NEVER_COMES = frozenset({"did not come", "left early", "mismatch"})
"""What the ranks wait for never comes, if all of them wait. In a circle of groups it may: from another thread, such as
a checkpoint writer's."""


def _outlook_of(
    found: HangFinding, positions: Mapping[int, RankPosition], looks: Sequence[RankLook], unseen: int
) -> HangPrognosis:
    """`positions` has the rank of each look; of `unseen` ranks nothing is known."""
    bound = {look.where.rank: _bound(positions[look.where.rank], look) for look in looks}
    free = [rank for rank, how in bound.items() if how == "free"]
    if free or unseen > 0:
        return HangPrognosis("may go on", free)
    stopped = any(position.kind == "stopped" for position in positions.values())
    if all(how == "shown" for how in bound.values()) and (stopped or found.cause in _NEVER_COMES):
        return HangPrognosis("cannot go on")
    return HangPrognosis("all wait")


def _bound(position: RankPosition, look: RankLook) -> Literal["shown", "seems", "free"]:
    """Whether a rank waits for others: shown by its own table, as its stack looks, or not."""
    if position.kind == "stopped":
        return "shown" if look.state == "T" else "free"  # t: a debugger looks at it
    if look.phase == "raised":
        return "seems"  # it does not come back; what it does while it leaves, such as an upload, may take a while
    placed = standing_at(look.groups) is not None
    if placed and position.kind == "waits" and position.operation in (DEVICE, BACKWARD):  # it may spin meanwhile
        return "shown"
    if look.busy >= QUIET:
        return "free"
    if position.kind == "waits" and placed:
        return "shown"
    if position.kind == "unknown" and placed:
        return "seems"
    # a `wait` that its table does not show is of something else, or of its device
    if (position.kind == "waits" and position.operation != "wait") or position.operation == BACKWARD:
        return "seems"
    return "free"


# Whether a hang ends the ranks now, and the sentence for the user about it. Pure.

PATIENCE_TIMES = 4.0
"""The factor on the limit for a job that may still end by itself, though nothing shows it."""
_NEARLY = 0.9
"""Share of the time that suffices, because the ranks of a hang do not stop at the same moment."""


@dataclass(frozen=True)
class HangAction:
    """The action that follows from a finding."""

    now: bool
    """The ranks are ended."""
    text: str
    """`ending the ranks`, or why they are not, and what to do to have them ended."""


def ending_of(
    found: HangFinding, looks: Sequence[RankLook], on_hang: OnHang, limit_s: float, timeout_s: float = 0.0
) -> HangAction:
    """`limit_s` is the limit that the first rank has passed. `timeout_s`: of its process group, as it has passed none.

    That one ends the job, if the rank that the others wait for does not come in time.
    """
    if timeout_s > 0:
        return HangAction(False, f"the timeout of its process group, {timeout_s:.0f} s, ends the job")
    if on_hang == "report":
        return HangAction(False, f"{_LEAVES}; to end it: --on-hang abort")
    return _abort(found, looks, limit_s) if on_hang == "abort" else _auto(found, looks, limit_s)


def before_limit(action: HangAction, limit_s: float) -> HangAction:
    """The action of a finding that was made before a rank has passed its limit: nothing is ended until then."""
    return HangAction(False, f"if no rank moves, gpuwatch ends the job after {limit_s:.0f} s") if action.now else action


def _auto(found: HangFinding, looks: Sequence[RankLook], limit_s: float) -> HangAction:
    outlook = found.outlook
    if outlook.kind == "may go on":
        who = ranks_text(outlook.free) if outlook.free else "a rank that did not report"
        anyway = "the timeouts of its process groups still apply; to end it anyway: --on-hang abort"
        return HangAction(False, f"{_LEAVES}, because {who} may still go on; {anyway}")
    if outlook.kind == "all wait" and not _have_rested(looks, PATIENCE_TIMES * limit_s):
        return HangAction(False, f"if no rank moves, gpuwatch ends the job after {PATIENCE_TIMES * limit_s:.0f} s")
    return _END


def _abort(found: HangFinding, looks: Sequence[RankLook], limit_s: float) -> HangAction:
    """End all ranks if the others wait for one; a rank that computes gets more time, as it may finish."""
    if not found.may_end:
        return HangAction(False, f"{_LEAVES}, because it sees no rank wait for another")
    patience_s = PATIENCE_TIMES * limit_s
    working = [look for look in looks if look.where.rank in found.ranks and computes(look)]
    early = [look.where.rank for look in working if not _have_rested([look], patience_s)]
    if not early:
        return _END
    who = f"{ranks_text(early)} {'computes' if len(early) == 1 else 'compute'}"
    return HangAction(False, f"{_LEAVES}, because {who}; it ends the job after {patience_s:.0f} s")


def _have_rested(looks: Sequence[RankLook], seconds: float) -> bool:
    return all(look.still_s >= _NEARLY * seconds for look in looks)


_END = HangAction(True, "ending the ranks")
_LEAVES = "gpuwatch leaves the job as it is"
