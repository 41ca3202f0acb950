"""The verdict of a run without a failure: which tensors were checked, and how close they were to their limits.

"Clean" needs proof (`missing`). Without it the verdict is `unknown` and lists the gaps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count, islice
from operator import itemgetter

from ...core.errors import Code, coded
from ...core.events.own_limits import OwnFault
from ...core.frames import module_text
from ...core.identity import is_rank, rank_name
from ...core.text import ranks_text as numbers_text
from ...core.text import shown_name
from ...core.verdicts import Certainty, VerdictKind
from ..facts.facts import RankFacts, RunFacts
from ..facts.words import doing, step_for_compiled, warning_text, whose, worst_first
from ..report.model import Verdict
from ..report.sentence_parts import counted, grouped, ranks_text

# What a rank did not record, by faults of gpuwatch's own or in a second thread: it may hold the maker. Pure.


def doubts_about(rank: RankFacts) -> list[str]:
    """What may be missing before the first anomaly of a rank, a line for each part that has failed by then.

    A fault of a later batch cannot concern it. One of an unknown batch can: it is counted as an earlier one. So is one
    that was counted and whose record was lost.
    """
    last = rank.anomalies[0].where.page if rank.anomalies else -1
    by_part: dict[str, OwnFault] = {}
    for fault in sorted(rank.faults_that_cost_frames, key=lambda fault: (fault.where.page, fault.where.time_ns)):
        if fault.where.page <= last or last < 0:
            by_part.setdefault(fault.part, fault)
    failed = []
    for fault in by_part.values():
        since = (
            f"in batch {fault.where.batch}"
            if fault.where.page >= 0
            else "before its first batch, or at an unknown time"
        )
        failed.append(f"{fault.part} failed {since} ({fault.message})")
    if rank.lost_faults:
        failed.append(f"parts failed {counted(rank.lost_faults, 'time')} more; its log had no room to record where")
    return [
        *(
            f"rank {rank.rank}: gpuwatch's own {text}: the value may have been made in what was not recorded since"
            for text in failed
        ),
        *_unrecorded(rank, last),
    ]


def _unrecorded(rank: RankFacts, last: int) -> Iterator[str]:
    """A line about each time in which nothing was recorded, if it had begun by the page of the anomaly."""
    state = rank.counts
    calls = "such calls are not recorded, and one may have made the value"
    ran = "what ran until they were restored is not recorded, and may have made the value"
    left_out = f"a thread called modules while another thread was in a forward; {calls}"
    gone = f"the script, or a library, had cleared torch's global hooks, including gpuwatch's; {ran}"
    for times, first, line in (
        (state.calls_left_out, state.left_out_page, left_out),
        (state.hooks_gone, state.gone_page, gone),
    ):
        if times and not 0 <= last < first:
            yield f"rank {rank.rank}: {line}"


# Gaps that keep a run from being clean: places that could hide an overflow and were not observed.

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
        *([(Code.CHILD_UNWATCHED, _first_of(unwatched))] if unwatched else []),
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
    elif rank.pages and not any(page.num_frames for page in rank.pages.values()):
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


_MOST_EVIDENCE = 12
_BY_ANOTHER_PROGRAM = (
    "gpuwatch launch watches only the Python script that it runs itself. To watch every Python that another program "
    "starts, use gpuwatch run: gpuwatch run -- torchrun, with the same arguments (--no-python python train.py)."
)
_NOTHING_CALLED = (
    "gpuwatch checks the inputs and outputs of the modules in a rank's own process, and none was called; it does not "
    "watch other processes that a script starts"
)
_BY_THE_MODULE = (
    "To have the inputs and outputs of a compiled module inspected, compile the module, torch.compile(model), instead "
    "of a function that calls it."
)


def clean_verdict(facts: RunFacts) -> Verdict:
    """`clean` if it is proven that nothing overflowed; else `unknown`, with the gaps in the proof."""
    gaps = missing(facts)
    if not gaps:
        return _clean(facts)
    lacking = [clause for _, clause in gaps]
    ranks = facts.of_attempt(facts.last_attempt)
    below = " (below)" if len(lacking) > 1 else ""
    statement = f"No overflow seen, but it is not proven that there was none: {_first_of(lacking)}{below}."
    if not facts.has_ended:
        statement = f"No overflow seen so far: {_scope(ranks)}."
    evidence = [coded(clause, code) for code, clause in gaps[:_MOST_EVIDENCE]] if below or not facts.has_ended else []
    idle = f"{numbers_text([rank.rank for rank in ranks])} called no module"
    if ranks and not facts.processes and lacking == [idle]:  # all were watched to their ends: that proves nothing
        has_stepped = any(rank.state is not None and rank.state.step > 0 for rank in ranks)
        what = "Only steps of optimizers were" if has_stepped else "Nothing was"
        statement = f"{what} watched: no module was called on {counted(len(ranks), 'rank')}."
        evidence = [_NOTHING_CALLED, *_loose_lines(ranks)]
    return Verdict(
        VerdictKind.UNKNOWN,
        statement,
        Certainty.UNKNOWN,
        attempt=facts.last_attempt,
        evidence=evidence,
        next=[
            *([_BY_ANOTHER_PROGRAM] if any(rank.ran_another_program for rank in ranks) else []),
            *([_BY_THE_MODULE] if any(not each.around for rank in ranks for each in rank.not_looked_into) else []),
        ],
        missing=lacking[:_MOST_EVIDENCE],
        cause_code=gaps[0][0],
    )


def _first_of(found: list[str]) -> str:
    return f"{found[0]}, and {len(found) - 1} more" if len(found) > 1 else found[0]


def _clean(facts: RunFacts) -> Verdict:
    ranks = [*facts.of_attempt(facts.last_attempt), *facts.lone(facts.last_attempt)]
    batches, scope = _batches(ranks), _scope(ranks)
    idle = max((rank.counts.batches_skipped for rank in facts.everyone.values()), default=0)  # before a restart, too
    statement = f"No overflow: {scope}, every watched tensor finite{_exceptions(ranks)}."
    if idle:
        looked_at = f"{idle} {'was' if idle == 1 else 'were'} skipped"
        if idle < batches:
            looked_at = f"only one in {round(batches / (batches - idle))} was inspected"
        scope += f" ({looked_at})"
        statement = f"No overflow seen: {scope}, every inspected tensor was finite{_exceptions(ranks)}."
    hidden = sorted({module_text(each.module, each.cls) for rank in ranks for each in rank.not_looked_into})
    if hidden:
        more = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
        statement += f" Compiled code inside {hidden[0]}{more} was not inspected."
    unseen = dict.fromkeys(unseen.text for rank in ranks for unseen in rank.compiled_unseen)
    statement += "".join(f" {text[0].upper()}{text[1:]}." for text in unseen)
    # before a restart, too, and in order, whoever was heard first
    everyone = [rank for found in (facts.ranks, facts.processes) for _, rank in sorted(found.items())]
    doubts = [*_loose_lines(ranks), *_unread_lines(everyone), *_child_lines(everyone)]
    if doubts:
        statement += f" {doubts[0][0].upper()}{_first_of(doubts)[1:]}."
    warnings = worst_first([(rank.rank, warned) for rank in ranks for warned in rank.warned])
    if warnings:
        closest = [f"{rank_name(number)}, {warning_text(warned)}" for number, warned in warnings]
        statement += f" Closest to trouble: {_first_of(closest)}."
    is_told = all(rank.told_its_end for rank in ranks) and not doubts
    return Verdict(
        VerdictKind.CLEAN,
        statement,
        Certainty.ESTABLISHED if is_told else Certainty.SUPPORTED,
        attempt=facts.last_attempt,
        next=[
            *([step_for_compiled(ranks)] if hidden else []),
            *(["Inspect every batch with --every 1."] if idle else []),
        ],
    )


def unnamed_overflow_verdict(facts: RunFacts) -> Verdict | None:
    """A rank says that it has seen an overflow, and its record of where has not come through."""
    ranks = [rank for rank in facts.everyone.values() if rank.counts.overflow]
    if not ranks:
        return None
    attempt = min(rank.attempt for rank in ranks)
    numbers = sorted(rank.rank for rank in ranks if rank.attempt == attempt)
    one = whose(facts, facts.one(attempt, numbers[0])) | {"device": None} if len(numbers) == 1 else {}
    return Verdict(
        VerdictKind.OVERFLOW,
        f"{ranks_text(numbers).capitalize()} saw an overflow; its module is unknown.",
        Certainty.UNKNOWN,
        **one,
        attempt=attempt,
        evidence=["the recorder's header says so; the event itself was lost"],
    )


def _loose_lines(ranks: list[RankFacts]) -> list[str]:
    """Lines on parameters that optimizers stepped on but no called module has, so that no frames show their use.

    Those never read are a gap in the proof, which `missing` reports instead.
    """
    loose = ((rank.rank, each) for rank in ranks for each in rank.loose_parameters if not each.unread)
    by_what = grouped(loose, lambda entry: (entry[1].optimizer, entry[1].parameters))
    return [
        f"on {ranks_text([number for number, _ in found])} {optimizer} updated {counted(count, 'parameter')} that "
        f"belong{'s' if count == 1 else ''} to no module that was called: {'it was' if count == 1 else 'they were'} "
        "read after each step, and nowhere else"
        for (optimizer, count), found in by_what.items()
    ]


def _unread_lines(ranks: list[RankFacts]) -> Iterator[str]:
    """Lines on what an optimizer kept in 16 bits after its last step, and that nobody has read."""
    unread = ((rank.rank, each) for rank in ranks for each in rank.unread_states)
    for (optimizer, steps), found in grouped(unread, lambda entry: (entry[1].optimizer, entry[1].steps)).items():
        yield (
            f"on {ranks_text([number for number, _ in found])} what {optimizer} keeps in 16 bits or less was not read "
            f"after its last {counted(steps, 'step')}: it was freed before"
        )


def _child_lines(ranks: list[RankFacts]) -> list[str]:
    """Lines on children that have called modules by themselves. One that has trained is a gap in the proof."""
    return [
        f"a child process (pid {pid}) of {rank_name(rank.rank)} called modules and was not watched"
        for rank in ranks
        if (pid := rank.counts.calling_child)
    ]


def _batches(ranks: list[RankFacts]) -> int:
    return max((rank.batches for rank in ranks), default=0)


def _scope(ranks: list[RankFacts]) -> str:
    """`2 ranks, 1 batch`"""
    batches = _batches(ranks)
    return f"{_ranks_and_processes(ranks)}, {batches} batch{'es' if batches != 1 else ''}"


def _ranks_and_processes(ranks: list[RankFacts]) -> str:
    """`2 ranks`, `1 rank and 1 process that is no rank`."""
    known = sum(is_rank(rank.rank) for rank in ranks)
    lone = len(ranks) - known
    others = f"{lone} processes that are not ranks" if lone != 1 else "1 process that is not a rank"
    return " and ".join([*([counted(known, "rank")] if known or not lone else []), *([others] if lone else [])])


def _led_nowhere(number: int, ranks: list[RankFacts]) -> str:
    """`6 tensors of nan out of masks that the model took away`, or the first of them, where there are others."""
    tensors = counted(number, "tensor")
    others = [told for rank in ranks for told in rank.absorbed if told.why]
    if not others:
        return f"{tensors} of nan from masks, which the model discarded"
    first = others[0]
    place = f"{first.value} in {shown_name(first.role)} of {module_text(first.module, first.cls)}"
    return f"{tensors} that had no effect (first: {place})"


def _passed(ranks: list[RankFacts]) -> list[str]:
    """`+inf that rank 1 put into all_reduce in batch 5`: the first that passed between ranks and led nowhere."""
    bad = [(one.where.batch, one.came_out, rank.rank, one) for rank in ranks for one in rank.passed]
    if not bad:
        return []
    batch, came_out, number, one = min(bad, key=itemgetter(0, 1, 2))
    did = "got from" if came_out else "put into"
    when = f"in batch {batch}" if batch >= 0 else "before its first batch"
    more = f" (and {counted(len(bad) - 1, 'more such tensor')})" if len(bad) > 1 else ""
    return [f"{one.value} that {rank_name(number)} {did} {one.operation} {when}{more}"]


def _exceptions(ranks: list[RankFacts]) -> str:
    hidden, absorbed = sum(rank.hidden_rows for rank in ranks), sum(rank.absorbed_rows for rank in ranks)
    skipping = [rank.rank for rank in ranks if rank.skipped_steps]
    found = [f"{counted(hidden, 'row')} that --ignore hides"] if hidden else []
    found += [f"gradients whose step a GradScaler skipped on {ranks_text(skipping)}"] if skipping else []
    found += [_led_nowhere(absorbed, ranks)] if absorbed else []
    found += _passed(ranks)
    return f", except for {' and '.join(found)}" if found else ""
