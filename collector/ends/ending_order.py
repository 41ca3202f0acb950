"""In which order the ranks of an attempt ended. Pure.

The collectives that two ranks had issued on a common group order them: fewer is earlier. If both ran on one host, its
clock counts as well: a rank may run ahead of another in collectives that it does not wait for. A rank that reports only
that another rank is gone is never first.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeVar

from ...core.events.run_position import RunPosition
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import first_line
from .killed_in_a_wait import killed_in_a_wait

_NUMBER = re.compile(r"\d+")
_Group = TypeVar("_Group", str, tuple[str, str])

_TOGETHER_NS = 10 * 10**6
"""Ranks of one host whose ends may lie closer together ended at the same time."""
_ALIKE_NS = 10**9
"""Ranks of one host that raise the same within this time have one reason."""
_SEEN_NS = 10**9
"""A rank may have ended up to this long before an agent noticed it."""


@dataclass(frozen=True)
class ExitOrder:
    """How the ranks of an attempt ended."""

    by_themselves: list[RankFacts]
    """Those that their launcher did not stop, or that ended badly before it did; the first to end first."""
    first: RankFacts | None
    """The rank that ended first; None if all of them report only that another rank is gone."""
    same: list[RankFacts] = field(default_factory=list)
    """Others that ended at the same point as the first. Ranks of one host must also have ended at the same time, or
    within a second if they raised the same."""
    alike: list[tuple[RankFacts, int]] = field(default_factory=list)
    """(rank, delay) for those in `same` that raised the same later: nanoseconds by the clock of their common host."""
    later: list[tuple[RankFacts, int]] = field(default_factory=list)
    """(rank, delay) for others that ended at the same point later, at least by `delay` nanoseconds of that clock."""
    behind: list[tuple[RankFacts, int]] = field(default_factory=list)
    """(rank, delay) for others that had issued fewer collectives and ended at least `delay` nanoseconds later."""
    too: list[RankFacts] = field(default_factory=list)
    """Others that raised the same as the first by themselves, at another point."""


def endings_of(facts: RunFacts, attempt: int) -> ExitOrder:
    """Which ranks of an attempt ended by themselves, and in which order."""
    signals = signals_of(facts)
    ranks = [rank for rank in facts.of_attempt(attempt) if _ended_by_itself(rank, signals)]
    if not ranks:  # a parent fails because its ranks have, and not vice versa
        ranks = [process for process in facts.lone(attempt) if _ended_by_itself(process, signals)]
    waited = {rank.rank for rank in killed_in_a_wait(facts.of_attempt(attempt))}
    ended = sorted(
        (_RankExit(facts, rank, waited) for rank in ranks), key=lambda one: (one.lost_a_peer, one.seq, one.number)
    )
    ended = [one for one in ended if not one.was_cut_short or _is_surely_first(one, ended)]
    own = [one for one in ended if not one.lost_a_peer]
    own = [one for one in own if not one.is_weak or not any(_stopped_for(one, other) for other in own)]
    own = [one for one in own if not one.was_stopped or not any(_stopped_for(one, other) for other in ended)]
    if not own:
        return ExitOrder([one.rank for one in ended], None)
    earliest = [one for one in own if not any(_is_before(other, one) for other in own)] or own
    earliest.sort(key=lambda one: (one.is_weak, one.number))
    on_one_host = len({one.host for one in earliest}) == 1 and all(one.times[0] for one in earliest)
    if on_one_host:
        earliest.sort(key=lambda one: (sum(one.times), one.number))
    first, others = earliest[0], earliest[1:]
    gaps = [(one.rank, (_gap_ns(first, one) or 0) if on_one_host else 0) for one in others]
    too = [one for one in own if one not in earliest and _raised_alike(first.rank, one.rank)]
    too = [one for one in too if abs(_gap_ns(first, one) or 0) < _ALIKE_NS]
    rest = [one for one in own if one not in earliest and one not in too]
    behind = [(one.rank, _gap_ns(first, one) or 0) for one in rest if _fewer(one, first)]
    return ExitOrder(
        [one.rank for one in [*earliest, *(one for one in ended if one not in earliest)]],
        first.rank,
        [rank for rank, ns in gaps if _is_together(first.rank, rank, ns)],
        [(rank, ns) for rank, ns in gaps if ns >= _TOGETHER_NS and _is_together(first.rank, rank, ns)],
        [(rank, ns) for rank, ns in gaps if not _is_together(first.rank, rank, ns)],
        behind,
        [one.rank for one in too],
    )


class _RankExit:
    """A rank's end, with the counts and times that order it among the others."""

    def __init__(self, facts: RunFacts, rank: RankFacts, waited: Collection[int] = ()) -> None:
        """`waited`: the ranks that a library ended while they waited for others."""
        error, script, exit_ = rank.error, rank.script_exit, rank.exit
        self.rank, self.number, self.host = rank, rank.rank, facts.host(rank)
        self.lost_a_peer = error.peer_failure if error is not None else rank.hid_a_peer_failure or rank.rank in waited
        self.was_stopped = exit_ is not None and exit_.by == "torchrun"
        self.was_cut_short = self.was_stopped and error is None and (rank.code or 0) < 0
        """Its launcher killed it after its script had ended: in its teardown, or as it left too slowly."""
        self.is_weak = rank.was_aborted_at_exit or self.was_stopped
        """It may have ended badly because its launcher stopped it, or because its peers were gone."""
        own: RunPosition | None = error.where if error is not None else script.where if script is not None else None
        if script is not None and error is None and script.code == 0:
            own = None  # its end came after that of its script
        self.tells = own is not None and own.time_ns > 0
        """It has recorded itself when it ended, and the collectives that it had issued by then."""
        self.seq = own.seq if own is not None else exit_.where.seq if exit_ is not None else -1
        self.clock = own.clock if own is not None else {}
        self.begun = {(group.name, group.members): group.begun for group in exit_.groups} if exit_ is not None else {}
        self.times = (0, 0)
        """It ended between these times of its host's clock; (0, 0) if unknown."""
        if own is not None and self.tells:
            self.times = (own.time_ns, own.time_ns)
        elif exit_ is not None and error is None:
            self.times = (exit_.alive_ns, exit_.ended_ns)


def _is_before(one: _RankExit, other: _RankExit) -> bool:
    """Whether `one` had issued fewer collectives, unless the clock of their common host proves the opposite."""
    slack_ns = _TOGETHER_NS if one.tells and other.tells else _SEEN_NS
    if _fewer(one, other):
        return (_gap_ns(other, one) or 0) < slack_ns
    return _fewer(other, one) and (_gap_ns(one, other) or 0) >= slack_ns


def _is_together(first: RankFacts, other: RankFacts, ns: int) -> bool:
    return ns < _TOGETHER_NS or (ns < _ALIKE_NS and _raised_alike(first, other))


def _raised_alike(first: RankFacts, other: RankFacts) -> bool:
    """Whether both raised the same exception with the same words. Numbers may differ: each rank may name its own."""
    mine, theirs = first.error, other.error
    if mine is None or theirs is None:
        return False
    words = [(_NUMBER.sub("0", e.error), _NUMBER.sub("0", first_line(e.message))) for e in (mine, theirs)]
    return words[0] == words[1]


def _stopped_for(one: _RankExit, other: _RankExit) -> bool:
    """Whether one that may have been stopped ended after another that was not."""
    if other.is_weak:
        return False
    gap_ns = _gap_ns(other, one)
    return gap_ns >= _TOGETHER_NS if gap_ns is not None else _fewer(other, one)


def _is_surely_first(one: _RankExit, ended: list[_RankExit]) -> bool:
    """Whether one whose teardown was cut short had ended before all that were not: a launcher stops it for these."""
    others = (other for other in ended if not other.was_cut_short)
    return all(gap >= 0 if (gap := _gap_ns(one, other)) is not None else _fewer(one, other) for other in others)


def _fewer(one: _RankExit, other: _RankExit) -> bool:
    """Whether it had certainly issued fewer collectives, on groups that both are in."""
    if one.clock.keys() & other.clock.keys():
        return _is_less(one.clock, other.clock)
    if one.begun.keys() & other.begun.keys():
        return _is_less(one.begun, other.begun)
    if one.clock or other.clock or one.begun or other.begun:
        return False
    return one.tells == other.tells and 0 <= one.seq < other.seq


def left_before(facts: RunFacts, rank: RankFacts, victim: RankFacts) -> bool:
    """Whether a rank whose process has ended had issued fewer collectives than another had when that lost a peer.

    By each group that both were in. A sum stands for the one group that both were in, if no messages are in it.
    """
    one, other = _RankExit(facts, rank), _RankExit(facts, victim)
    if one.begun.keys() & other.begun.keys() and (_is_less(one.begun, other.begun) or _is_less(other.begun, one.begun)):
        return _is_less(one.begun, other.begun)
    error = victim.error
    has_messages = error is not None and bool(error.where.sent or error.where.received)
    groups = one.begun.keys() | other.begun.keys() | {(group, "") for group in other.clock if not other.begun}
    return len(groups) <= 1 and not has_messages and 0 <= one.seq < other.seq


def took_down_before(facts: RunFacts, rank: RankFacts, victim: RankFacts) -> bool:
    """Whether a rank took its process group down before another one lost a peer, with fewer collectives on it."""
    teardown, error = rank.teardown, victim.error
    if teardown is None or error is None:
        return False
    is_later = facts.host(rank) == facts.host(victim) and error.where.time_ns < teardown.where.time_ns
    return not is_later and _is_less(teardown.where.clock, error.where.clock)


def _is_less(mine: dict[_Group, int], theirs: dict[_Group, int]) -> bool:
    common = [group for group in mine.keys() & theirs.keys() if min(mine[group], theirs[group]) >= 0]
    less = any(mine[group] < theirs[group] for group in common)
    return less and not any(mine[group] > theirs[group] for group in common)


def _gap_ns(one: _RankExit, other: _RankExit) -> int | None:
    """The time by which the other certainly ended later; None if they share no clock."""
    if one.host != other.host or not one.times[0] or not other.times[0]:
        return None
    return other.times[0] - one.times[1]


def signals_of(facts: RunFacts) -> set[int]:
    """The signals that ended the launches."""
    return {node.signal.signal for node in facts.nodes.values() if node.signal is not None}


def was_signalled(rank: RankFacts, signals: set[int]) -> bool:
    """Whether a rank ended by the signals that ended the launches, which it may have got, too."""
    if rank.error is not None:
        return bool(signals) and rank.error.error == "KeyboardInterrupt"
    return -(rank.code or 0) in signals


def _ended_by_itself(rank: RankFacts, signals: set[int]) -> bool:
    """Whether a rank ended without torchrun. `signals` ended the launches."""
    if was_signalled(rank, signals):
        return False
    if rank.error is not None:
        return True
    if rank.was_killed or rank.left_silently:
        return True
    if rank.script_exit is not None and rank.script_exit.code != 0:
        # its launcher may kill a process in its teardown, after its script has ended by itself
        return rank.own_code is not None or (rank.code or 0) >= 0 or rank.exited_badly
    return bool(rank.own_code)
