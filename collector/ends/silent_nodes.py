"""A hang in which a node does not answer: the node is lost, or the link to it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...core.codes import Certainty
from ...core.events.agent_events import RankLook
from ...core.text import ranks_text
from .hang_model import HangFinding, position_of

SILENT = "silent"
"""Cause of such a finding."""
IS_LOST = "the node, or the link to it, is lost"
WAS_SILENT = f"went silent: {IS_LOST}"
WAS_KILLED = "ended without a word: the launch and the agent there were killed, or the host went down"
"""What is said of one node whose connection was closed at its end, with no goodbye."""


def ranks_by_host(nodes: Iterable[tuple[str, list[int]]]) -> dict[str, list[int]]:
    """(host, ranks) of silent nodes -> host -> ranks. Two nodes may have one name."""
    found: dict[str, list[int]] = {}
    for host, ranks in nodes:
        found.setdefault(host, []).extend(ranks)
    return found


def with_silent_nodes(
    found: HangFinding, silent: Mapping[str, list[int]], looks: Sequence[RankLook], ended: int, world_size: int
) -> HangFinding:
    """The finding, or in its place the node, where nobody else is named and all ranks that did not answer are on it.

    `silent`: host -> its ranks, of nodes that send no more. `ended`: how many ranks have.
    """
    ranks = sorted(rank for some in silent.values() for rank in some)
    answered = {look.where.rank for look in looks}
    is_whole = len(answered) + ended + len(ranks) >= world_size
    if not ranks or answered & set(ranks) or not is_whole or (found.ranks and found.certainty != Certainty.UNKNOWN):
        return found
    statement = f"{node_text(silent)} {WAS_SILENT}."
    waiting = sorted(look.where.rank for look in looks if position_of(look).waiting)
    if waiting:
        statement += f" {ranks_text(waiting).capitalize()} wait{'s' if len(waiting) == 1 else ''} for what is there."
    hosts = ", ".join(sorted(silent))
    next_ = [f"Check whether {hosts} is up; if not, leave it out of the next run."]
    return replace(found, statement=statement, certainty=Certainty.SUPPORTED, ranks=ranks, next=next_, cause=SILENT)


def node_text(silent: Mapping[str, list[int]]) -> str:
    """`Node n1 (rank 1)`, `Nodes n1, n2 (ranks 8-23)`"""
    ranks = sorted(rank for some in silent.values() for rank in some)
    who = f" ({ranks_text(ranks)})" if ranks else ""
    return f"{'Node' if len(silent) == 1 else 'Nodes'} {', '.join(sorted(silent))}{who}"
