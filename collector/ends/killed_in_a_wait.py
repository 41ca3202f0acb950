"""The ranks that a signal ended while they waited for others, and the peers that had got less far. Pure.

A library ends the process that waits, and not the one that it waits for. NCCL's watchdog and gloo abort it (SIGABRT).
What that does to other threads of the library may come first, as another signal. SIGKILL comes from outside: then it is
certain how the rank ended, and not that it was at fault.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.events.agent_events import RankLook
from ...core.recorder.group_table import members_of
from ...core.recorder.operation_mismatch import standing_at
from ..facts.rank_facts import RankFacts
from .end_positions import looks_of
from .hang_model import position_of
from .pending_operations import begun_in, is_pending

WAITED_S = 2.0
"""A rank that a signal ended sooner after it had last moved may not have waited for anybody."""

_PHASES = {"forward": 0, "backward": 1, "optimizer": 2}
_SCRIPT = "script"
_ON_HOST = ("issuing", "waiting")
_BEGUN = (*_ON_HOST, "issued", "on_device")


def killed_in_a_wait(ranks: list[RankFacts]) -> list[RankFacts]:
    """The ranks of an attempt that ended themselves by a signal while they waited for others, as far as can be seen.

    After an abort, less is asked: a main thread that is aborted in code of the script's own has done it itself, and on
    a GPU's host it may be anywhere while a collective stands still. A memory fault may be the rank's own, too. So the
    rank must have stood for a while, and a peer that it waited for must have got less far.
    """
    looks = looks_of(ranks)
    found = []
    for rank in ranks:
        if rank.error is not None or rank.rank not in looks or rank.was_aborted_at_exit:
            continue
        if rank.was_aborted:
            waited = _was_aborted_in_a_wait(rank, looks)
        else:
            stood = rank.was_faulted and rank.script_exit is None and looks[rank.rank].still_s >= WAITED_S
            waited = stood and not _in_own_thread(rank) and bool(_waited_for(rank, ranks, looks))
        found += [rank] if waited else []
    return found


def _in_own_thread(rank: RankFacts) -> bool:
    """Whether the signal came to a thread of the script's own beside its main one."""
    exit_ = rank.exit
    return exit_ is not None and bool(exit_.main) and any(line.line for line in exit_.stack)


def _was_aborted_in_a_wait(rank: RankFacts, looks: Mapping[int, RankLook]) -> bool:
    look, main = looks[rank.rank], rank.exit is not None and bool(rank.exit.main)
    is_ahead = any(may_be_behind(other, look) for number, other in looks.items() if number != rank.rank)
    on_device = main and not (rank.device or "cpu").startswith("cpu")
    seen = standing_at(look.groups) is not None or position_of(look).waiting
    return seen or (is_ahead and not look.stack) or (len(looks) > 1 and on_device)


def waited_for(rank: RankFacts, ranks: list[RankFacts]) -> list[RankFacts]:
    """The peers that a rank seems to have waited for when a signal ended it: they may have got less far.

    [] if it did not wait and its script had not ended, or if the kernel says that it ended the rank for its memory.
    """
    return _waited_for(rank, ranks, looks_of(ranks))


def _waited_for(rank: RankFacts, ranks: list[RankFacts], looks: Mapping[int, RankLook]) -> list[RankFacts]:
    look, exit_ = looks.get(rank.rank), rank.exit
    if look is None or exit_ is None or not rank.was_killed or rank.error is not None or exit_.memory_kills:
        return []
    is_over = rank.script_exit is not None
    if not is_over and not _seems_to_wait(look, by_main=not exit_.main):
        return []
    place = None if is_over else standing_at(look.groups)
    members = members_of(place[0].members, len(ranks)) if place is not None else looks
    others = [other for other in ranks if other is not rank and other.rank in members and other.rank in looks]
    return [other for other in others if may_be_behind(looks[other.rank], look)]


def _seems_to_wait(look: RankLook, *, by_main: bool) -> bool:
    """`by_main`: its stack, if there is one, is that of the thread that got the signal."""
    if position_of(look).waiting:
        return True
    if look.stack and by_main:  # in code of its own
        return any(group.phase in _ON_HOST and group.at for group in look.groups)
    is_reducing = look.phase == "backward" and not look.stack  # or it is all computation
    return is_reducing or is_pending(look.groups) or any(group.phase in _BEGUN for group in look.groups)


def may_be_behind(one: RankLook, other: RankLook) -> bool:
    """Whether one had got less far, by its batch, its phase and the collectives that it had begun.

    A script's own part of a batch may be before the backward or after it: there the collectives have to tell.
    """
    if one.where.batch != other.where.batch:
        return one.where.batch < other.where.batch
    pairs = [(number, group.begun) for group in other.groups if (number := begun_in(one.groups, group)) is not None]
    if any(mine != theirs for mine, theirs in pairs):
        return all(mine <= theirs for mine, theirs in pairs)
    if one.phase == _SCRIPT or (other.phase == _SCRIPT and one.phase in _PHASES):
        return one.phase != other.phase and other.phase in (*_PHASES, _SCRIPT, "finished")
    mine, theirs = _PHASES.get(one.phase), _PHASES.get(other.phase)
    return mine is not None and theirs is not None and mine < theirs
