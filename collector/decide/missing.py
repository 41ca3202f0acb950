"""What keeps a run in which nothing bad was seen from being clean: what could hold an overflow and was not heard."""

from __future__ import annotations

from itertools import count, islice

from ...core.frames import module_text
from ...core.text.ranks_text import ranks_text
from ..facts.facts import RankFacts, RunFacts
from .own_faults import that_cost_frames
from .words import doing, left_silently

_MOST_NAMED = 64
"""Ranks that were never heard are named up to this many."""


def missing(facts: RunFacts) -> list[str]:
    """One clause per reason, the ranks that share it together; [] if every rank of the job was looked at to its end.

    >>> missing(facts)
    ['rank 3 was not heard after batch 41', 'ranks 0, 1 called no module']
    """
    ranks = facts.of_attempt(facts.last_attempt)
    by_reason: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        for reason in _of_rank(rank):
            by_reason.setdefault(reason, []).append(rank.rank)
    silent = _never_heard(facts, ranks)
    if silent:
        by_reason.setdefault(("was never heard", "were never heard"), []).extend(silent)
    clauses = [
        f"{ranks_text(numbers)} {one if len(numbers) == 1 else many}" for (one, many), numbers in by_reason.items()
    ]
    return [*_of_nodes(facts, bool(ranks or silent)), *clauses, *_of_pages(facts)]


def nothing_watched(facts: RunFacts) -> bool:
    """Whether no rank has called a module, all of them were watched to their ends, and nothing else is missing."""
    ranks = facts.of_attempt(facts.last_attempt)
    idle = {f"{ranks_text([rank.rank for rank in ranks])} called no module"}
    return bool(ranks) and set(missing(facts)) == idle


def batches_of(rank: RankFacts) -> int:
    """Forwards of its models, as far as is known."""
    if rank.exit is not None and rank.exit.where.batch >= 0:
        return rank.exit.where.batch + 1
    return rank.state.batch + 1 if rank.state is not None else 0


def _of_rank(rank: RankFacts) -> list[tuple[str, str]]:
    """(for one rank, for several)"""
    exit_, state = rank.exit, rank.state
    if exit_ is None or exit_.code is None:
        place = f"after batch {batches_of(rank) - 1}" if batches_of(rank) > 0 else "to its end"
        return [(f"was not heard {place}", f"were not heard {place}")]
    if exit_.phase == "unwatched":
        return [("ran a program that is not watched", "ran programs that are not watched")]
    if state is None or not state.final:
        if exit_.phase == "starting" or state is None:
            return [("had no recorder", "had no recorders")]
        return [("was not heard to the end of its recorder", "were not heard to the ends of their recorders")]
    if state.hooks == "failed":
        return [("could not be watched: the hooks failed", "could not be watched: the hooks failed")]
    found = []
    if left_silently(rank):
        text = f"left with exit code 0 {doing(exit_)}"
        found.append((text, text))
    if batches_of(rank) <= 0:
        found.append(("called no module", "called no module"))
    elif exit_.where.page < 0:
        found.append(("left out every batch", "left out every batch"))
    elif rank.pages and not any(page.num_frames for page in rank.pages.values()):
        text = "looked at no module in its batches (--modules: does a pattern match?)"
        found.append((text, text.replace("its", "their")))
    if state.pending:
        text = f"ended before {_count(state.pending, 'number')} had come back from the device"
        found.append((text, text))
    if state.rows_lost:
        text = f"had no room for {_count(state.rows_lost, 'row')}"
        found.append((text, text))
    for hidden in [hidden for hidden in rank.not_looked_into if not hidden.around][:1]:
        text = f"ran compiled code of {module_text(hidden.module, hidden.cls)} that was not looked into"
        found.append((text, text))
    for fault in that_cost_frames(rank.faults)[:1]:
        text = f"met an error of gpuwatch itself ({fault.part}: {fault.message})"
        found.append((text, text))
    return found


def _never_heard(facts: RunFacts, ranks: list[RankFacts]) -> list[int]:
    known = {rank.rank for rank in ranks}
    world = max((rank.state.world_size for rank in ranks if rank.state is not None), default=0)
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    if not world and all(hello.min_nodes == hello.max_nodes for hello in hellos):
        world = sum(hello.nproc for hello in hellos)
    few = min(max(0, world - len(known)), _MOST_NAMED)
    return list(islice((number for number in count() if number not in known), few))


def _of_nodes(facts: RunFacts, any_rank: bool) -> list[str]:
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    wanted = max((hello.min_nodes for hello in hellos), default=1)
    found = []
    silent = wanted - len(hellos)
    if silent > 0:
        found.append(f"{silent} of {_count(wanted, 'node')} {'was' if silent == 1 else 'were'} never heard")
    elif not any_rank:
        notes = [node.bye.note for node in facts.nodes.values() if node.bye is not None and node.bye.note]
        found.append("no rank was heard" + (f" ({notes[0]})" if notes else ""))
    unended = {
        node.hello.host
        for agent, node in facts.nodes.items()
        if node.hello is not None and _may_have_failed(facts, agent)
    }
    return [*found, *(f"how the job ended on {host} was not heard" for host in sorted(unended))]


def _may_have_failed(facts: RunFacts, agent: str) -> bool:
    """Its ranks have ended, and its goodbye, which tells whether that was a failure, was not heard."""
    ranks = [rank for rank in facts.ranks.values() if rank.agent == agent]
    return facts.nodes[agent].bye is None and all(rank.exit is not None for rank in ranks)


def _of_pages(facts: RunFacts) -> list[str]:
    pages = facts.undecodable_pages + facts.unnamed_pages
    return [*([f"{_count(pages, 'page')} could not be read"] if pages else []), *lost_messages(facts)]


def lost_messages(facts: RunFacts) -> list[str]:
    """A clause for each node whose messages are not all there, though later ones are."""
    found = []
    for _, node in sorted(facts.nodes.items()):
        if node.messages_lost:
            host = node.hello.host if node.hello is not None else node.agent
            is_are = "is" if node.messages_lost == 1 else "are"
            found.append(f"{_count(node.messages_lost, 'message')} of node {host} {is_are} missing, or damaged")
    return found


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
