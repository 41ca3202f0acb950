"""Who the others wait for, from where all ranks stood. Pure, and the same live and in the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.events import RankLook, WorkerExit
from ...core.text import ranks_text
from ...core.verdicts import Certainty
from .hang_groups import RankGroups, find_by_groups, one_too_many
from .hang_model import BACKWARD, DEVICE, HangFinding, RankPosition, computes, outlook_of, standing_of


def find_hang(looks: Sequence[RankLook], ended: Mapping[int, WorkerExit], world_size: int) -> HangFinding | None:
    """None if it is no hang: nobody was seen, somebody has stopped all of the ranks on purpose, or none of them waits
    and one computes: what does not show in its recorder, such as an import, a compilation or a search.

    `ended` are the ranks of that attempt that have ended, with how they did. `world_size` is how many ranks there are.
    """
    if not looks:
        return None
    ordered = sorted(looks, key=lambda look: look.where.rank)
    standings = [standing_of(look) for look in ordered]
    found = _find(ordered, standings, ended, world_size)
    if found is None:
        return None
    unseen = world_size - len(standings) - len(ended)
    return replace(found, outlook=outlook_of(found, standings, ordered, unseen))


def _find(
    looks: Sequence[RankLook], standings: list[RankPosition], ended: Mapping[int, WorkerExit], world_size: int
) -> HangFinding | None:
    if all(standing.kind == "stopped" for standing in standings):
        return None
    still_s = min(look.still_s for look in looks)
    waiting = [standing for standing in standings if standing.waiting]
    away = _away(standings, looks)
    unseen = world_size - len(standings) - len(ended)
    evidence = [_line(group) for group in _alike(standings)]
    if unseen > 0:
        evidence.append(f"{unseen} of the ranks did not tell where they stand")
    if all(look.phase in ("finished", "raised") for look in looks):
        return _does_not_end(looks, standings, evidence)
    left = sorted(rank for rank, exit_ in ended.items() if exit_.code == 0)
    if len(left) == len(ended):
        shown = {standing.rank: _shown(standing, look) for standing, look in zip(standings, looks, strict=True)}
        shown |= {rank: RankGroups(exit_.groups, "left") for rank, exit_ in ended.items()}
        found = find_by_groups(shown, world_size, f"have waited{_for_text(still_s)}")
        if found is not None:
            return replace(found, evidence=[*evidence, *found.evidence])
    if waiting and left and not away:
        return _left_early(left, waiting, still_s, unseen, evidence)
    if waiting and away:
        return did_not_come(away, waiting, f"have waited{_for_text(still_s)}", unseen, evidence)
    if away and any(computes(look) for look in looks):
        return None
    if len(looks) == 1 and len(left) == world_size - 1 > 0 and away:
        return _last_one(away[0], still_s, evidence)
    if away:
        return _nobody_waits(away, still_s, world_size, evidence)
    return _all_wait(waiting, still_s, unseen, evidence)


def _away(standings: list[RankPosition], looks: Sequence[RankLook]) -> list[RankPosition]:
    """Those that do not wait. A rank that has raised lost another one: it is among them only if all of them have."""
    away = {standing.rank: standing for standing in standings if not standing.waiting}
    raised = {look.where.rank for look in looks if look.phase == "raised"}
    return [standing for rank, standing in away.items() if rank not in raised] or list(away.values())


def did_not_come(
    away: list[RankPosition],
    waiting: list[RankPosition],
    waited: str,
    unseen: int,
    evidence: list[str],
    *,
    stacks: bool = True,
) -> HangFinding:
    """Some wait for others, and some are elsewhere.

    `waited`: `have waited for 300 s`, `waited until they timed out`. `stacks`: the report has them.
    """
    if any(standing.kind == "unknown" for standing in away) or unseen > 0:
        certainty = Certainty.SUPPORTED
    else:
        sure = all(standing.kind == "waits" for standing in waiting)
        certainty = Certainty.ESTABLISHED if sure else Certainty.SUPPORTED
    who = _ranks(away).capitalize()
    where = f" It is {_what(away[0])}." if len(away) == 1 else ""
    statement = f"{who} did not come to {_operations(waiting)}, in which {_waited(waiting, waited)}.{where}"
    return HangFinding(
        statement,
        certainty if len(away) == 1 else Certainty.SUPPORTED,
        away[0].rank if len(away) == 1 else None,
        [standing.rank for standing in away] if len(away) > 1 else [],
        evidence,
        [
            f"Look at the line where {_ranks(away)} {'stands' if len(away) == 1 else 'stand'}; all stacks are below."
            if stacks
            else f"Look at what {_ranks(away)} did then. A stall that is told while it lasts shows the lines: "
            "--hang-timeout below the group's timeout."
        ],
    )


def _left_early(
    left: list[int], waiting: list[RankPosition], still_s: float, unseen: int, evidence: list[str]
) -> HangFinding:
    one = len(left) == 1
    statement = (
        f"{ranks_text(left).capitalize()} left early: {'its' if one else 'their'} script ended with exit code 0, while "
        f"{_wait_text(waiting, still_s)} in {_operations(waiting)}.{one_too_many([each.rank for each in waiting])}"
    )
    sure = one and unseen <= 0 and len(waiting) > 1 and all(standing.kind == "waits" for standing in waiting)
    return HangFinding(
        statement,
        Certainty.ESTABLISHED if sure else Certainty.SUPPORTED,
        left[0] if one else None,
        [] if one else left,
        evidence,
        ["Every rank must issue the same collectives: look for a loop that is shorter on it, or an early return."],
    )


def _does_not_end(looks: Sequence[RankLook], standings: list[RankPosition], evidence: list[str]) -> HangFinding:
    """Their scripts have ended or raised: they are held by an exit function, a thread or a destructor."""
    one = len(looks) == 1
    raised = all(look.phase == "raised" for look in looks)
    who = f"{_ranks(standings).capitalize()} {'has' if one else 'have'} not ended"
    why = f"since {'its' if one else 'their'} script {'raised' if raised else 'ended'}"
    line = f" It is at {standings[0].line}." if one and standings[0].line else ""
    return HangFinding(
        f"{who} for {min(look.still_s for look in looks):.0f} s {why}.{line}",
        Certainty.ESTABLISHED,
        standings[0].rank if one else None,
        [] if one else [standing.rank for standing in standings],
        evidence,
        ["Look for a thread that is not a daemon, a child process, or a function of atexit."],
        "does not end",
        may_end=raised,
    )


def _last_one(standing: RankPosition, still_s: float, evidence: list[str]) -> HangFinding:
    return HangFinding(
        f"Rank {standing.rank} has not moved for {still_s:.0f} s, and all other ranks have ended. It is "
        f"{_what(standing)}.",
        Certainty.SUPPORTED if standing.kind == "unknown" else Certainty.ESTABLISHED,
        standing.rank,
        [],
        evidence,
        [f"Look at the line where rank {standing.rank} stands."],
        "last one",
    )


def _nobody_waits(away: list[RankPosition], still_s: float, world_size: int, evidence: list[str]) -> HangFinding:
    if world_size == 1:
        statement = f"Rank 0 has not moved for {still_s:.0f} s. It is {_what(away[0])}."
        next_ = ["Look at the line where it stands."]
        return HangFinding(statement, Certainty.ESTABLISHED, 0, [], evidence, next_, may_end=False)
    statement = (
        f"No rank has moved for {still_s:.0f} s, and none waits in a collective: which one it is about is unknown."
    )
    next_ = ["Look at the lines where they stand."]
    return HangFinding(statement, Certainty.UNKNOWN, None, [], evidence, next_, may_end=False)


def _all_wait(waiting: list[RankPosition], still_s: float, unseen: int, evidence: list[str]) -> HangFinding:
    operations = Counter(standing.operation for standing in waiting)
    most, number = operations.most_common(1)[0]
    odd = [standing for standing in waiting if standing.operation != most]
    if unseen > 0:
        statement = (
            f"{_wait_text(waiting, still_s).capitalize()} in {_operations(waiting)}, and {unseen} of the ranks did not "
            "tell where they stand: one of those did not come, or the link to its node is lost."
        )
        return HangFinding(statement, Certainty.UNKNOWN, None, [], evidence, ["Look at the nodes that did not tell."])
    if DEVICE in operations:
        statement = (
            f"All ranks wait, and {_ranks([s for s in waiting if s.operation == DEVICE])} in {DEVICE}: in which "
            "collective a GPU stands cannot be seen from here."
        )
        return HangFinding(statement, Certainty.UNKNOWN, None, [], evidence, ["Compare the lines where they stand."])
    if odd and 2 * number > len(waiting) and "wait" not in operations and BACKWARD not in operations:
        statement = (
            f"{_ranks(odd).capitalize()} {'waits' if len(odd) == 1 else 'wait'} in {_operations(odd)}, where "
            f"{number} other ranks wait in {most}: the ranks do not issue the same collectives."
        )
        one = odd[0].rank if len(odd) == 1 else None
        return HangFinding(
            statement,
            Certainty.SUPPORTED,
            one,
            [] if one is not None else [standing.rank for standing in odd],
            evidence,
            ["Every rank must issue the same collectives in the same order: compare the lines below."],
        )
    if odd:
        statement = (
            f"All ranks wait, and not in the same operation ({_operations(waiting)}): the ranks do not issue the same "
            "collectives, or wait in different ways for one. Which rank is the odd one is unknown."
        )
        return HangFinding(statement, Certainty.UNKNOWN, None, [], evidence, ["Compare the lines where they stand."])
    statement = (
        f"All {len(waiting)} ranks have come to {most}, and none has moved for {still_s:.0f} s: no rank is missing, so "
        "their sizes or dtypes differ, or the network or a device does not bring it to an end."
    )
    return HangFinding(
        statement,
        Certainty.UNKNOWN,
        None,
        [],
        evidence,
        ["Compare the lines where they stand; if they are the same, test the links: gpuwatch check."],
    )


def _shown(standing: RankPosition, look: RankLook) -> RankGroups:
    if standing.waiting:
        return RankGroups(look.groups, standing.kind, f"in {standing.operation}")
    return RankGroups(look.groups, "away" if standing.kind == "own" else standing.kind, _what(standing))


def _alike(standings: list[RankPosition]) -> list[list[RankPosition]]:
    groups: dict[tuple[str, str, str], list[RankPosition]] = {}
    for standing in standings:
        groups.setdefault((standing.kind, standing.operation, standing.line), []).append(standing)
    return list(groups.values())


def _line(group: list[RankPosition]) -> str:
    """`ranks 0-2 wait in all_reduce: train.py:41 in main: dist.all_reduce(loss)`"""
    first = group[0]
    who = ranks_text([standing.rank for standing in group])
    one = len(group) == 1
    if first.waiting:
        verb = "waits" if one else "wait"
        if first.kind == "may wait":
            verb = "seems to wait" if one else "seem to wait"
        what = f"{verb} in {first.operation}"
    elif first.kind == "stopped":
        what = "is stopped" if one else "are stopped"
    elif first.kind == "unknown":
        what = f"{'is' if one else 'are'} {first.doing}; no stack could be had"
    else:
        what = f"{'is' if one else 'are'} {first.doing}"
    return f"{who} {what}" + (f": {first.line}" if first.line else "")


def _what(standing: RankPosition) -> str:
    if standing.kind == "stopped":
        return f"stopped (by SIGSTOP, Ctrl-Z or a debugger), {standing.doing}"
    return standing.doing + (f", at {standing.line}" if standing.line else "")


def _ranks(standings: list[RankPosition]) -> str:
    return ranks_text([standing.rank for standing in standings])


def _operations(standings: list[RankPosition]) -> str:
    return " and ".join(sorted({standing.operation for standing in standings}))


def _wait_text(waiting: list[RankPosition], still_s: float) -> str:
    return _waited(waiting, f"have waited{_for_text(still_s)}")


def _waited(waiting: list[RankPosition], waited: str) -> str:
    return f"{_ranks(waiting)} {waited.replace('have', 'has', 1) if len(waiting) == 1 else waited}"


def _for_text(still_s: float) -> str:
    """` for 300 s`; "" where they have just moved: into a group's timeout, while they were asked."""
    return f" for {still_s:.0f} s" if still_s >= 1 else ""
