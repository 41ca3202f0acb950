"""Gaps that keep a run from being clean: places that could hide an overflow and were not observed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count, islice
from operator import itemgetter

from ...core.codes import Code
from ...core.frames import module_text
from ...core.text import ranks_text as numbers_text
from ...core.text import shown_name
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import doing
from ..report.sentence_parts import counted, grouped

_Reason = tuple[Code, str, str]
"""A gap in a rank's record: its code, the clause for one rank, and for several that share it."""
_Gap = tuple[Code, str]


def _reason(code: Code, text: str, *values: object) -> _Reason:
    """Each clause takes its side of `[one|several]`; both take the values."""
    one, several = (re.sub(r"\[(.*?)\|(.*?)\]", rf"\{number}", text) for number in (1, 2))
    return code, one.format(*values), several.format(*values)


_MOST_NAMED = 64
"""Ranks that were never heard are named up to this many."""


def missing(facts: RunFacts) -> list[_Gap]:
    """One clause per gap, with all ranks that share it; [] if every rank of the job was watched to its end.

    In an attempt before a restart, a rank that was stopped early or called no module is no gap; lost records are one.

    >>> missing(facts)
    [(Code.RANK_UNHEARD, 'rank 3 was not heard after batch 41'), (Code.NO_MODULE_CALLED, 'rank 0 called no module')]
    """
    ranks = facts.of_attempt(facts.last_attempt)
    fixed = all(hello.min_nodes == hello.max_nodes for hello in facts.hellos)
    silent = _unheard(ranks, _world_of(ranks) or (sum(hello.nproc for hello in facts.hellos) if fixed else 0))
    everyone = [*ranks, *facts.lone(facts.last_attempt)]
    ends = {rank.rank: _of_its_end(rank, so_far=not facts.has_ended) for rank in everyone}
    reasons = {rank.rank: [*(ends[rank.rank] or _of_its_work(rank)), *_of_its_losses(rank)] for rank in everyone}
    # Python processes below `gpuwatch run` that looked for torch, or ran a module, and could not be watched
    unwatched = [reason for node in facts.nodes.values() if node.bye is not None for reason in node.bye.unwatched]
    pages = facts.undecodable_pages + facts.unnamed_pages
    return [
        *_of_nodes(facts, bool(ranks or silent)),
        *_clauses(reasons, silent),
        *_of_earlier_attempts(facts),
        *([(Code.CHILD_UNWATCHED, first_of(unwatched))] if unwatched else []),
        *([(Code.RECORDS_LOST, f"{counted(pages, 'page')} could not be read")] if pages else []),
        *((Code.RECORDS_LOST, clause) for clause in lost_messages(facts)),
    ]


def _of_earlier_attempts(facts: RunFacts) -> list[_Gap]:
    found = []
    for attempt in sorted({attempt for attempt, _ in facts.ranks if attempt != facts.last_attempt}):
        ranks = facts.of_attempt(attempt)
        ends = {rank.rank: _of_its_end(rank, goes_on=_goes_on(facts, rank)) for rank in ranks}
        reasons = {rank.rank: [*ends[rank.rank], *_of_its_losses(rank)] for rank in ranks}
        clauses = _clauses(reasons, _unheard(ranks, _world_of(ranks)))
        found += [(code, f"in attempt {attempt}, {clause}") for code, clause in clauses]
    return found


def _goes_on(facts: RunFacts, rank: RankFacts) -> bool:
    """Whether its process is a later attempt of the same rank: the script has called os.exec below `gpuwatch run`."""
    later = [each.state for each in facts.ranks.values() if each.rank == rank.rank and each.attempt > rank.attempt]
    return rank.state is not None and any(state is not None and state.pid == rank.state.pid for state in later)


def _clauses(reasons: Mapping[int, list[_Reason]], silent: list[int]) -> list[_Gap]:
    pairs = [(number, reason) for number, found in reasons.items() for reason in found]
    pairs += [(number, _reason(Code.RANK_UNHEARD, "[was|were] never heard from")) for number in silent]
    groups = [([number for number, _ in found], reason) for reason, found in grouped(pairs, itemgetter(1)).items()]
    return [
        (code, f"{numbers_text(numbers)} {one if len(numbers) == 1 else many}") for numbers, (code, one, many) in groups
    ]


def _of_its_end(rank: RankFacts, *, goes_on: bool = False, so_far: bool = False) -> list[_Reason]:
    """Why its end was not heard, or it was not watched at all; [] if it was. `goes_on`: as a later attempt. `so_far`:
    the run has not ended."""
    exit_, state = rank.exit, rank.state
    if exit_ is None and so_far:
        place = f"in batch {rank.batches - 1}" if rank.batches > 0 else "before its first batch"
        return [_reason(Code.RANK_UNHEARD, "[has|have] not ended: last heard from {}", place)]
    if exit_ is None or exit_.code is None:
        place = f"after batch {rank.batches - 1}" if rank.batches > 0 else "at its end"
        return [_reason(Code.RANK_UNHEARD, "[was|were] not heard from {}", place)]
    if rank.ran_another_program and not goes_on:
        if state is not None and state.hooks != "none":
            return [
                _reason(
                    Code.OTHER_PROGRAM, "became [another program|other programs] (os.exec), which [is|are] not watched"
                )
            ]
        return [_reason(Code.OTHER_PROGRAM, "ran [a program that is|programs that are] not watched")]
    if state is None or (not state.final and exit_.phase == "starting"):
        return [_reason(Code.NO_RECORDER, "had no [recorder|recorders]")]
    if not state.final:
        return [_reason(Code.END_UNREPORTED, "did not send the [end of its record|ends of their records]")]
    return [_reason(Code.HOOKS_FAILED, "could not be watched: the hooks failed")] if state.hooks == "failed" else []


def _of_its_work(rank: RankFacts) -> list[_Reason]:
    exit_ = rank.exit
    found = []
    if exit_ is not None and rank.left_silently:
        found.append(_reason(Code.END_UNREPORTED, "exited with code 0 {}", doing(exit_)))
    elif exit_ is not None and not (rank.told_its_end or rank.counts.left):
        end = "the [end of its script was|ends of their scripts were] not reported"
        found.append(_reason(Code.END_UNREPORTED, f"ended with exit code {{}} {{}}: {end}", exit_.code, doing(exit_)))
    if rank.batches <= 0:
        found.append(_reason(Code.NO_MODULE_CALLED, "called no module"))
    elif exit_ is not None and exit_.where.page < 0:
        found.append(_reason(Code.NOTHING_SELECTED, "skipped every batch"))
    elif rank.pages and not (rank.counts.has_frames or any(page.shows_modules for page in rank.pages.values())):
        found.append(
            _reason(
                Code.NOTHING_SELECTED, "watched no module in [its|their] batches (--modules: does a pattern match?)"
            )
        )
    return found


def _of_its_losses(rank: RankFacts) -> Iterator[_Reason]:
    state = rank.counts
    if not state.final or state.hooks == "failed":
        return
    if state.unseen_child:
        yield _reason(
            Code.CHILD_UNWATCHED, "had a child process (pid {}) that trained and was not watched", state.unseen_child
        )
    if state.pending:
        yield _reason(
            Code.RECORDS_LOST, "ended before {} had been read back from the device", counted(state.pending, "number")
        )
    if state.rows_lost:
        yield _reason(Code.RECORDS_LOST, "had no room for {}", counted(state.rows_lost, "row"))
    if state.rows_interrupted:
        rows = counted(state.rows_interrupted, "row")
        yield _reason(
            Code.RECORDS_LOST, "lost {} that were being read on a device when a signal's handler raised", rows
        )
    for hidden in [hidden for hidden in rank.not_looked_into if not hidden.around][:1]:
        yield _reason(
            Code.COMPILED_UNSEEN,
            "ran compiled code of {} that was not inspected",
            module_text(hidden.module, hidden.cls),
        )
    if rank.unmeasured is not None:
        one = rank.unmeasured
        role, module = shown_name(one.role), module_text(one.module, one.cls)
        text = "had tensors that could not be measured, such as {} of {} ({})"
        yield _reason(Code.TENSOR_UNMEASURED, text, role, module, one.dtype)
    for loose in [loose for loose in rank.loose_parameters if loose.unread][:1]:
        parameters = counted(loose.unread, "parameter")
        yield _reason(
            Code.PARAMETERS_UNREAD, "trained {} on a device that no called module has ({})", parameters, loose.optimizer
        )
    for fault in rank.faults_that_cost_frames[:1]:
        yield _reason(Code.OWN_FAULT, "met an error in gpuwatch itself ({}: {})", fault.part, fault.message)
    if rank.lost_faults:
        errors = counted(rank.lost_faults, "error")
        yield _reason(Code.OWN_FAULT, "met {} in gpuwatch itself that [its|their] log had no room for", errors)
    if state.calls_left_out:
        calls, when = counted(state.calls_left_out, "module call"), "while another thread was in a forward"
        yield _reason(Code.THREAD_UNSEEN, "made {} in a thread {}: what they computed was not recorded", calls, when)
    if state.hooks_gone:
        who, times = "[its script|their scripts], or a library,", counted(state.hooks_gone, "time")
        yield _reason(Code.HOOKS_CLEARED, f"lost gpuwatch's hooks {{}}: {who} cleared torch's global hooks", times)
    if state.hooks == "detached":
        yield _reason(
            Code.HOOKS_FAILED,
            "[was|were] no longer watched after errors in gpuwatch itself: [its|their] hooks were removed",
        )
    if state.events_lost:
        records = counted(state.events_lost, "record")
        yield _reason(Code.RECORDS_LOST, "lost {}: [its log was|their logs were] full, or [is|are] damaged", records)


def _world_of(ranks: list[RankFacts]) -> int:
    """How many ranks an attempt has, as its own ranks say; 0: not known."""
    return max((rank.counts.world_size for rank in ranks), default=0)


def _unheard(ranks: list[RankFacts], world: int) -> list[int]:
    known = {rank.rank for rank in ranks}
    few = min(max(0, world - len(known)), _MOST_NAMED)
    return list(islice((number for number in count() if number not in known), few))


def _of_nodes(facts: RunFacts, any_rank: bool) -> list[_Gap]:
    hellos = facts.hellos
    wanted = max((hello.min_nodes for hello in hellos), default=1)
    found = []
    silent = wanted - len(hellos)
    if silent > 0:
        were = "was" if silent == 1 else "were"
        found.append((Code.NODE_UNHEARD, f"{silent} of {counted(wanted, 'node')} {were} never heard from"))
    elif not any_rank:
        notes = [node.bye.note for node in facts.nodes.values() if node.bye is not None and node.bye.note]
        found.append((Code.RANK_UNHEARD, "no rank was heard from" + (f" ({notes[0]})" if notes else "")))
    # where ranks still run, their own gaps say more; a goodbye tells whether their ends were a failure
    running = {rank.agent for rank in facts.ranks.values() if rank.exit is None}
    unended = [node for node in facts.nodes.values() if node.bye is None and node.agent not in running]
    hosts = sorted({node.host for node in unended if node.hello is not None})
    return [*found, *((Code.END_UNREPORTED, f"the end of the job on {host} was not reported") for host in hosts)]


def lost_messages(facts: RunFacts) -> list[str]:
    """A clause for each node whose messages are not all there, though later ones are."""
    found = []
    for _, node in sorted(facts.nodes.items()):
        if node.messages_lost:
            host, is_are = node.host or node.agent, "is" if node.messages_lost == 1 else "are"
            found.append(f"{counted(node.messages_lost, 'message')} of node {host} {is_are} missing, or damaged")
    return found


def first_of(found: list[str]) -> str:
    """The first of them, and how many more there are."""
    return f"{found[0]}, and {len(found) - 1} more" if len(found) > 1 else found[0]
