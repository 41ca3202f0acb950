"""What keeps a run in which nothing bad was seen from being clean: what could hold an overflow and was not heard."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, islice

from ...core.frames import module_text
from ...core.text.ranks_text import ranks_text
from ..facts.facts import RankFacts, RunFacts
from .own_faults import lost_faults, that_cost_frames
from .words import doing, left_silently, told_its_end

_Reason = tuple[str, str]
"""What is missing of a rank: for one rank, for several that share it."""
_MOST_NAMED = 64
"""Ranks that were never heard are named up to this many."""


def missing(facts: RunFacts) -> list[str]:
    """One clause per reason, the ranks that share it together; [] if every rank of the job was looked at to its end.

    In an attempt before a restart a rank may have been stopped, or have called no module: what it did was judged.

    >>> missing(facts)
    ['rank 3 was not heard after batch 41', 'ranks 0, 1 called no module']
    """
    ranks = facts.of_attempt(facts.last_attempt)
    silent = _never_heard(facts, ranks)
    everyone = [*ranks, *facts.lone(facts.last_attempt)]
    reasons = {rank.rank: [*(_of_its_end(rank) or _of_its_work(rank)), *_of_its_losses(rank)] for rank in everyone}
    clauses = _clauses(reasons, silent)
    return [
        *_of_nodes(facts, bool(ranks or silent)),
        *clauses,
        *_of_earlier_attempts(facts),
        *_of_unwatched(facts),
        *_of_pages(facts),
    ]


def _of_earlier_attempts(facts: RunFacts) -> list[str]:
    found = []
    for attempt in sorted({attempt for attempt, _ in facts.ranks if attempt != facts.last_attempt}):
        ranks = facts.of_attempt(attempt)
        reasons = {
            rank.rank: [*_of_its_end(rank, goes_on=_goes_on(facts, rank)), *_of_its_losses(rank)] for rank in ranks
        }
        found += [f"in attempt {attempt}, {clause}" for clause in _clauses(reasons, _unheard(ranks, _world_of(ranks)))]
    return found


def _goes_on(facts: RunFacts, rank: RankFacts) -> bool:
    """Whether its process is a later attempt of the same rank: the script has called os.exec below `gpuwatch run`."""
    pid = rank.state.pid if rank.state is not None else None
    return any(
        later.state is not None and later.state.pid == pid
        for later in facts.ranks.values()
        if later.rank == rank.rank and later.attempt > rank.attempt
    )


def _clauses(reasons: Mapping[int, list[_Reason]], silent: list[int]) -> list[str]:
    """Reasons by rank, and the ranks that were never heard."""
    by_reason: dict[_Reason, list[int]] = {}
    for number, found in reasons.items():
        for reason in found:
            by_reason.setdefault(reason, []).append(number)
    if silent:
        by_reason.setdefault(("was never heard", "were never heard"), []).extend(silent)
    return [f"{ranks_text(numbers)} {one if len(numbers) == 1 else many}" for (one, many), numbers in by_reason.items()]


def nothing_watched(facts: RunFacts) -> bool:
    """Whether no rank has called a module, all of them were watched to their ends, and nothing else is missing."""
    ranks = facts.of_attempt(facts.last_attempt)
    idle = {f"{ranks_text([rank.rank for rank in ranks])} called no module"}
    return bool(ranks) and not facts.processes and set(missing(facts)) == idle


def ran_another_program(rank: RankFacts) -> bool:
    """Whether it is a program that `--no-python` has started."""
    return rank.exit is not None and rank.exit.phase == "unwatched"


def batches_of(rank: RankFacts) -> int:
    """Forwards of its models, as far as is known."""
    if rank.exit is not None and rank.exit.where.batch >= 0:
        return rank.exit.where.batch + 1
    return rank.state.batch + 1 if rank.state is not None else 0


def _of_its_end(rank: RankFacts, *, goes_on: bool = False) -> list[_Reason]:
    """Why its end was not heard, or it was not watched at all; [] if it was. `goes_on`: as a later attempt."""
    exit_, state = rank.exit, rank.state
    if exit_ is None or exit_.code is None:
        place = f"after batch {batches_of(rank) - 1}" if batches_of(rank) > 0 else "to its end"
        return [(f"was not heard {place}", f"were not heard {place}")]
    if ran_another_program(rank) and not goes_on:
        if state is not None and state.hooks != "none":
            text = "went on as another program (os.exec), which is not watched"
            return [(text, text.replace("another program", "other programs").replace("which is", "which are"))]
        return [("ran a program that is not watched", "ran programs that are not watched")]
    if state is None or not state.final:
        if exit_.phase == "starting" or state is None:
            return [("had no recorder", "had no recorders")]
        return [("was not heard to the end of its recorder", "were not heard to the ends of their recorders")]
    if state.hooks == "failed":
        return [("could not be watched: the hooks failed", "could not be watched: the hooks failed")]
    return []


def _of_its_work(rank: RankFacts) -> list[_Reason]:
    """How it left, and what there was to look at."""
    exit_ = rank.exit
    found = []
    if exit_ is not None and left_silently(rank):
        text = f"left with exit code 0 {doing(exit_)}"
        found.append((text, text))
    elif exit_ is not None and not (told_its_end(rank) or (rank.state is not None and rank.state.left)):
        text = f"ended with exit code {exit_.code} {doing(exit_)}: the end of its script was not heard"
        found.append((text, text.replace("the end of its script was", "the ends of their scripts were")))
    if batches_of(rank) <= 0:
        found.append(("called no module", "called no module"))
    elif exit_ is not None and exit_.where.page < 0:
        found.append(("left out every batch", "left out every batch"))
    elif rank.pages and not any(page.num_frames for page in rank.pages.values()):
        text = "looked at no module in its batches (--modules: does a pattern match?)"
        found.append((text, text.replace("its", "their")))
    return found


def _of_its_losses(rank: RankFacts) -> list[_Reason]:
    """What of its record was lost, or was not made: that may hold an overflow."""
    state, found = rank.state, []
    if state is None or not state.final or state.hooks == "failed":
        return []
    if state.unseen_child:
        one = f"had a child process (pid {state.unseen_child}) that trained and was not watched"
        found.append((one, one))
    if state.pending:
        text = f"ended before {_count(state.pending, 'number')} had come back from the device"
        found.append((text, text))
    if state.rows_lost:
        text = f"had no room for {_count(state.rows_lost, 'row')}"
        found.append((text, text))
    for hidden in [hidden for hidden in rank.not_looked_into if not hidden.around][:1]:
        text = f"ran compiled code of {module_text(hidden.module, hidden.cls)} that was not looked into"
        found.append((text, text))
    for loose in [loose for loose in rank.loose_parameters if loose.unread][:1]:
        text = f"trained {_count(loose.unread, 'parameter')} on a device that no called module has ({loose.optimizer})"
        found.append((text, text))
    for fault in that_cost_frames(rank.faults)[:1]:
        text = f"met an error of gpuwatch itself ({fault.part}: {fault.message})"
        found.append((text, text))
    if lost_faults(rank):
        text = f"met {_count(lost_faults(rank), 'error')} of gpuwatch itself that its log had no room for"
        found.append((text, text.replace("its", "their")))
    if state.calls_left_out:
        calls = _count(state.calls_left_out, "module call")
        text = f"made {calls} in a thread while another thread was in a forward: what they computed was not recorded"
        found.append((text, text))
    if state.hooks_gone:
        times = _count(state.hooks_gone, "time")
        text = f"was without gpuwatch's hooks {times}: its script, or a library, had cleared torch's global hooks"
        found.append((text, text.replace("was", "were", 1).replace("its script", "their scripts")))
    if state.hooks == "detached":
        text = "was watched no more after errors of gpuwatch itself: its hooks were removed"
        found.append((text, text.replace("was", "were", 1).replace("its", "their")))
    if state.events_lost:
        text = f"lost {_count(state.events_lost, 'record')}: its log was full, or is damaged"
        found.append((text, text.replace("its log was", "their logs were").replace("is damaged", "are damaged")))
    return found


def _never_heard(facts: RunFacts, ranks: list[RankFacts]) -> list[int]:
    world = _world_of(ranks)
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    if not world and all(hello.min_nodes == hello.max_nodes for hello in hellos):
        world = sum(hello.nproc for hello in hellos)
    return _unheard(ranks, world)


def _world_of(ranks: list[RankFacts]) -> int:
    """How many ranks an attempt has, as its own ranks say; 0: not known."""
    return max((rank.state.world_size for rank in ranks if rank.state is not None), default=0)


def _unheard(ranks: list[RankFacts], world: int) -> list[int]:
    """The ranks below `world` that are none of these, up to a few."""
    known = {rank.rank for rank in ranks}
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


def _of_unwatched(facts: RunFacts) -> list[str]:
    """Python processes below `gpuwatch run` that looked for torch, or ran a module, and could not be watched."""
    found = [reason for node in facts.nodes.values() if node.bye is not None for reason in node.bye.unwatched]
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"{found[0]}{more}"] if found else []


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
