"""The verdict of a job from its logs alone: who was first, as far as they show it, and what to do. Pure.

A log is weaker than a recorder. It may be of some ranks only, and its lines are buffered. So nothing is established
here, and nothing is concluded from a rank that says nothing.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from ...core.gpu.counters import XIDS
from ...core.known_errors import explain
from ...core.verdicts import Certainty, VerdictKind
from ..ends.hang_groups import LOOK_FOR_AN_IF, ODD_UNKNOWN
from ..ends.kernel_kills import killed_step
from ..facts.log_facts import LogFacts, LoggedXid, RaisedError, TimedOutWork
from ..facts.log_lines import LogLine
from ..facts.words import first_line
from ..report.rank_states import signal_name
from ..report.sentence_parts import grouped, ranks_text
from ..report.verdict import ConcurrentOrigin, Verdict

_SIGNALS = (-11, -7, -4, -8)
"""SIGSEGV, SIGBUS, SIGILL, SIGFPE: a process does them to itself. SIGKILL and SIGABRT may follow from others."""
_NOT_TORCHRUNS = (*_SIGNALS, -9, -6)
"""With SIGKILL and SIGABRT. torchrun sends healthy ranks SIGTERM or SIGINT, and SIGKILL only after it has noted who
failed."""
_OF_AN_ERROR = 1
"""Python's exit code after any error, which a rank may have raised because of another. A higher one is the script's."""
_OF_ONE_SIZE = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"})
"""Collectives to which all ranks must give as many elements."""
_BETWEEN_TWO = frozenset({"SEND", "RECV", "COALESCED"})
_NOT_THE_JOBS = re.compile(r"Killed process \d+ \((?!python|pt_|ray|torch|train)[^)]*\)|StepId=\d+\.extern")
_SEEN_BEFORE = "Look at what {} printed before; python -X faulthandler shows its line."
_MOST_LINES = 8
_MOST_LETTERS = 200
_MONITORED = re.compile(r"Ranks? (\d[\d, ]*) failed to pass monitoredBarrier")
_NODE_LOST = re.compile(r"Node failure on (?P<node>\S+)|ON (?P<node_2>\S+) CANCELLED AT \S+ DUE TO NODE FAILURE")


def log_verdict(facts: LogFacts) -> Verdict:
    """The verdict of all files together; `unknown` where they do not say it, or say several things."""
    lost = _lost_node(facts)
    if lost is not None:
        return lost
    rules = (_bad_gpu, _out_of_memory, _raised, _signalled, _barrier, _mismatch, _never_came)
    found = [verdict for rule in rules if (verdict := rule(facts)) is not None]
    named = [verdict for verdict in found if verdict.certainty is not Certainty.UNKNOWN]
    limit = _ended_from_outside(facts)
    if limit is not None and any(verdict.kind is not VerdictKind.HANG for verdict in found):
        return limit  # a fact; what the others were is not certain beside it
    if len({(verdict.rank, *(one.rank for one in verdict.concurrent), verdict.host) for verdict in named}) > 1:
        return _several(named)
    if named and len(named) == len(found):
        return named[0]
    if found:
        return found[0] if len(found) == 1 else _several(found)
    return (
        (limit if not facts.timed_out else None)
        or _waited(facts)
        or _ended_first(facts)
        or _explained(facts)
        or _nothing()
    )


def _several(found: list[Verdict]) -> Verdict:
    statements = " ".join(verdict.statement for verdict in found)
    steps = list(dict.fromkeys(step for verdict in found for step in verdict.next))
    return replace(
        found[0],
        statement=f"The log has several failures, and does not show which was first: {statements}",
        certainty=Certainty.UNKNOWN,
        rank=None,
        host=None,
        concurrent=[],
        next=steps,
        evidence=[line for verdict in found for line in verdict.evidence],
    )


def _evidence(*lines: LogLine) -> list[str]:
    """Each line as it stands, with its place: `slurm-17.out:4711: [Rank 3] Watchdog caught ...`."""
    found = [f"{line.place}: {' '.join(line.text.split())[:_MOST_LETTERS]}" for line in lines]
    left = len(found) - _MOST_LINES
    return [*found[:_MOST_LINES], *([f"and {left} more lines"] if left > 0 else [])]


def _lost_node(facts: LogFacts) -> Verdict | None:
    for line, found in facts.explained:
        if (match := _NODE_LOST.search(line.text)) is not None:
            node = match["node"] or match["node_2"]
            statement = f"SLURM lost node {node} and ended the job."
            return _verdict(VerdictKind.LOST, statement, [found.next], [line], host=node)
    return None


def _bad_gpu(facts: LogFacts) -> Verdict | None:
    """An XID that means that the GPU, its link or its memory is bad, if only one GPU has it, and it was its first."""
    firsts: dict[tuple[str, str], LoggedXid] = {}
    for xid in facts.xids:
        firsts.setdefault((xid.line.host, xid.bus), xid)
    known = ((xid, XIDS[xid.number]) for xid in firsts.values() if xid.number in XIDS)
    bad = [(xid, means) for xid, means in known if means.grade == "fail"]
    if len(bad) != 1:
        return None
    (line, bus, number), means = bad[0]
    where = f" of {line.host}" if line.host else ""
    statement = f"The driver{where} reported XID {number} ({means.meaning}) for its GPU at PCI {bus}."
    return _verdict(VerdictKind.LOST, statement, [means.next], [line], host=line.host)


def _out_of_memory(facts: LogFacts) -> Verdict | None:
    tasks = [end for end in facts.ends if end.how == "Out Of Memory"]
    told = [(line, found) for line, found in facts.explained if "for lack of host memory" in found.sentence]
    told = [(line, found) for line, found in told if not _NOT_THE_JOBS.search(line.text)]
    if not tasks and not told:
        return None
    hosts = sorted({end.host for end in tasks} | {line.host for line, _ in told if line.host})
    where = f" on {', '.join(hosts)}" if hosts else ""
    which = f" (task {', '.join(end.tasks for end in tasks)})" if tasks else ""
    step = told[0][1].next if told else "Give the job more memory (--mem), or let it use less."
    lines = [*(end.line for end in tasks), *(line for line, _ in told)]
    statement = f"The kernel killed a process of the job{where} for lack of host memory{which}."
    return _verdict(VerdictKind.LOST, statement, [step], lines, host=hosts[0] if len(hosts) == 1 else "")


def _raised(facts: LogFacts) -> Verdict | None:
    """The rank that raised by itself. One that waited in a collective as well went on after that, or raised later."""
    waited = {work.rank for work in facts.timed_out} | {told.rank for told in facts.progress if told.timed_out}
    raised = [one for one in facts.raised if one.rank is None or one.rank not in waited]
    own = [one for one in raised if one.why == "own"]
    unclear = [one for one in raised if one.why == "unclear"]
    alike = grouped(own, lambda one: (one.error, re.sub(r"\d+", "0", first_line(one.message))))
    if not alike:
        return None
    texts = [f"{one.error}: {one.message}" for one in own]
    steps = list(dict.fromkeys(found.next for text in texts for found in explain(text) if found.own))
    steps = steps or ["The script itself failed: read its traceback in the log."]
    if len(alike) > 1 or unclear:
        groups = [*alike.values(), *([unclear] if unclear else [])]
        each = "; ".join(f"{_who(some)} raised {_error(some[0])}" for some in groups)
        statement = f"Different errors were raised, and the log does not show which was first: {each}."
        lines = [some[0].line for some in groups]
        return _verdict(VerdictKind.CRASH, statement, steps, lines, certainty=Certainty.UNKNOWN)
    same = next(iter(alike.values()))
    numbers = sorted({one.rank for one in same if one.rank is not None})
    who = _who(same)
    others = sorted({one.rank for one in raised if one.why == "follows" and one.rank is not None} - set(numbers))
    followed = f" {ranks_text(others).capitalize()} failed because of it." if others and numbers else ""
    statement = f"{who[:1].upper()}{who[1:]} raised {_error(same[0])}.{followed}"
    return _verdict(VerdictKind.CRASH, statement, steps, [one.line for one in same], ranks=numbers)


def _who(raised: list[RaisedError]) -> str:
    numbers = sorted({one.rank for one in raised if one.rank is not None})
    return ranks_text(numbers) if numbers else "the script"


def _error(raised: RaisedError) -> str:
    message = first_line(raised.message)
    return f"{raised.error}{f': {message}' if message else ''}{f', at {raised.place}' if raised.place else ''}"


def _signalled(facts: LogFacts) -> Verdict | None:
    """One rank that ended itself by a signal, and that torchrun saw first; or the only task that ended by itself."""
    failed = {failure.rank: failure for failure in facts.failures if failure.code in _SIGNALS}
    firsts = {failure.rank for failure in facts.failures if failure.is_first}
    if len(failed) == 1 and failed.keys() == firsts:
        (failure,) = failed.values()
        name = signal_name(-failure.code)
        statement = f"Rank {failure.rank} on {failure.host} was killed by {name}."
        step = _SEEN_BEFORE.format(f"rank {failure.rank}")
        return _verdict(VerdictKind.LOST, statement, [step], [failure.line], ranks=[failure.rank], host=failure.host)
    tasks = {(end.host, end.tasks): end for end in facts.ends}
    if failed or len(tasks) != 1:
        return None
    (end,) = tasks.values()
    if not end.tasks.isdigit() or end.how.startswith(("Exited", "Out Of Memory")):
        return None
    statement = f"Task {end.tasks} on {end.host} ended by itself: {end.how.lower()}."
    step = _SEEN_BEFORE.format("that task")
    return _verdict(VerdictKind.LOST, statement, [step], [end.line], host=end.host)


def _ended_first(facts: LogFacts) -> Verdict | None:
    """The rank that torchrun saw end first by a signal or a code of its own, where no line tells another cause.

    The first of another node counts for nothing if it wrote itself that it only lost a peer. Libraries abort those that
    lost a peer or waited for one, and say that in C++, where no prefix tells whose line it is.
    """
    killed = {each.rank: each for each in facts.failures if each.code in _NOT_TORCHRUNS or each.code > _OF_AN_ERROR}
    victims = {one.rank for one in facts.raised if one.why == "follows"}
    firsts = {failure.rank for failure in facts.failures if failure.is_first} - (victims - killed.keys())
    told = any(one.why == "unclear" for one in facts.raised) or any(found.own for _, found in facts.explained)
    elsewhere = any(not end.how.startswith("Exited") for end in facts.ends)
    if told or elsewhere or facts.progress or len(firsts) != 1 or not firsts <= killed.keys():
        return None
    (first,) = (killed[rank] for rank in firsts)
    name = signal_name(-first.code) if first.code < 0 else f"exit code {first.code}"
    if name == "SIGABRT" and (facts.with_watchdogs or facts.explained):
        return None
    step = _SEEN_BEFORE.format(f"rank {first.rank}")
    if name == "SIGKILL":
        step = f"{killed_step(first.host)} Under SLURM, give its output, too: it has the lines oom_kill."
    if first.code > 0:
        step = "The script, or a program that it runs, chose that code: look for sys.exit and os._exit, and at what"
        step += f" rank {first.rank} printed before."
    if len(killed) > 1:
        what = "Signals" if all(each.code < 0 for each in killed.values()) else "Signals or exit codes of their own"
        statement = f"{what} ended {ranks_text(sorted(killed))}, and the log does not show which was first."
        lines = [failure.line for failure in killed.values()]
        return _verdict(VerdictKind.LOST, statement, [step], lines, certainty=Certainty.UNKNOWN)
    statement = f"torchrun saw rank {first.rank} end first, {'by' if first.code < 0 else 'with'} {name}."
    kind = VerdictKind.LOST if first.code < 0 else VerdictKind.CRASH
    return _verdict(kind, statement, [step], [first.line], ranks=[first.rank], host=first.host)


def _barrier(facts: LogFacts) -> Verdict | None:
    """torch's monitored barrier says itself who did not come."""
    for line, found in facts.explained:
        if (match := _MONITORED.search(line.text)) is not None:
            numbers = [int(number) for number in re.findall(r"\d+", match[1])]
            statement = f"{ranks_text(numbers).capitalize()} did not reach a monitored barrier."
            return _verdict(VerdictKind.HANG, statement, [found.next], [line], ranks=numbers)
    return None


def _mismatch(facts: LogFacts) -> Verdict | None:
    """Ranks of one group that waited in different collectives, or with other sizes, under one number."""
    for (group, number), works in _meetings(facts):
        kinds = grouped((work for work in works if work.operation), _kind_of)
        if len(kinds) < 2:
            continue
        parts = sorted(kinds.items(), key=lambda pair: (-len(pair[1]), pair[1][0].rank))
        each = [f"{ranks_text(_ranks(some))} {_kind(*kind)}" for kind, some in parts]
        inside = f"As work {number} of group {group}, {', '.join(each)}"
        most, rest = parts[0][1], [work for _, some in parts[1:] for work in some]
        odd = _ranks(rest) if len(most) > 2 * len(rest) else []
        named = f"{ranks_text(odd).capitalize()} differ{'s' if len(odd) == 1 else ''} from all others." if odd else ""
        statement = f"{inside}: the ranks do not issue the same collectives. {named or ODD_UNKNOWN}"
        certainty = Certainty.SUPPORTED if odd else Certainty.UNKNOWN
        lines = [some[0].line for some in kinds.values()]
        return _verdict(VerdictKind.HANG, statement, [LOOK_FOR_AN_IF], lines, ranks=odd, certainty=certainty)
    return None


def _meetings(facts: LogFacts) -> list[tuple[tuple[str, int], list[TimedOutWork]]]:
    """The works of each group whose name all ranks share, the lowest number first.

    Sends and receives have numbers of their own, and count in the same line: with them, numbers tell nothing.
    """
    mixed = {work.rank for work in facts.timed_out if work.operation in _BETWEEN_TWO}
    works = [] if mixed else [work for work in facts.timed_out if work.group]
    told = {work.rank for work in facts.timed_out}
    works += [  # the line of its watchdog is missing
        TimedOutWork(last.rank, last.group, last.ended + 1, "", -1, 0.0, last.line)
        for last in facts.progress
        if not mixed and last.timed_out and last.rank not in told and -1 <= last.ended < last.begun
    ]
    return sorted(grouped(works, lambda work: (work.group, work.number)).items(), key=lambda pair: pair[0][1])


def _kind_of(work: TimedOutWork) -> tuple[str, int]:
    return work.operation, work.elements if work.operation in _OF_ONE_SIZE else -1


def _kind(operation: str, elements: int) -> str:
    return f"waited in {operation}" + (f" of {elements} elements" if elements >= 0 else "")


def _ranks(works: list[TimedOutWork]) -> list[int]:
    return sorted({work.rank for work in works})


def _never_came(facts: LogFacts) -> Verdict | None:
    """Ranks that had begun fewer collectives of a group than the one in which the others waited, by their own words."""
    waited_anywhere = {work.rank for work in facts.timed_out}
    for (group, number), works in _meetings(facts):
        last = {told.rank: told for told in facts.progress if told.group == group}
        waiting, operations = _ranks(works), {work.operation for work in works} - {""}
        behind = [told for rank, told in sorted(last.items()) if told.begun < number and rank not in waiting]
        if not behind or len(operations) > 1:
            continue
        numbers, begun = [told.rank for told in behind], sorted({told.begun for told in behind})
        waited = max(work.seconds for work in works)
        for_how_long = f" for {waited:.0f} s" if waited else ""
        their = "its" if len(numbers) == 1 else "their"
        ended = (
            f"{their} last begun is {begun[0]}" if len(begun) == 1 else f"{their} last begun are {begun[0]} and more"
        )
        operation = f" ({next(iter(operations))})" if operations else ""
        statement = (
            f"{ranks_text(numbers).capitalize()} had not begun work {number}{operation} of group {group}, in which "
            f"{ranks_text(waiting)} waited{for_how_long}{_at(works)}: {ended}."
        )
        elsewhere = [raised for raised in facts.raised if raised.rank in numbers]
        lines = [*(told.line for told in behind), *(work.line for work in works[:2])]
        if waited_anywhere & set(numbers) or (elsewhere and len(waiting) <= 2 * len(numbers)):
            at = f" (at {elsewhere[0].place})" if elsewhere and elsewhere[0].place else ""
            statement += f" They waited for others themselves{at}: the ranks do not issue the same collectives. "
            unknown = Certainty.UNKNOWN
            return _verdict(VerdictKind.HANG, statement + ODD_UNKNOWN, [LOOK_FOR_AN_IF], lines, certainty=unknown)
        statement += " Or a rank stood inside of that call." if not elsewhere else ""
        step = f"Look at what {ranks_text(numbers)} did then: data loading, a save, an evaluation, an early return."
        return _verdict(VerdictKind.HANG, statement, [step], lines, ranks=numbers)
    return None


def _at(works: list[TimedOutWork]) -> str:
    places = sorted({work.place for work in works if work.place})
    return f" at {places[0]}" if len(places) == 1 else ""


def _ended_from_outside(facts: LogFacts) -> Verdict | None:
    """A time limit or a preemption."""
    for line, found in facts.explained:
        if "CANCELLED AT" in line.text:
            sentence = f"{found.sentence[:1].upper()}{found.sentence[1:]}."
            return replace(_verdict(VerdictKind.INTERRUPTED, sentence, [found.next], [line]), signal="SIGTERM")
    return None


def _waited(facts: LogFacts) -> Verdict | None:
    """Ranks waited in a collective, and nothing shows for whom."""
    if not facts.timed_out:
        return None
    work = min(facts.timed_out, key=lambda work: work.number)
    same = [each for each in facts.timed_out if each.number == work.number and each.operation == work.operation]
    waiting = _ranks(same)
    silent = sorted(set(range(facts.world_size)) - set(_ranks(facts.timed_out)))
    hint = ""
    others = sorted({each.operation for each in facts.timed_out if each.number == work.number} - {work.operation})
    if others:
        hint = f" Other ranks waited in {', '.join(others)} under that number: they may not be of one group."
    elif silent and len(silent) <= max(1, facts.world_size // 8):
        hint = f" The log has no timeout of {ranks_text(silent)}: look there first."
    elif len(waiting) > 1 and facts.ranks <= set(waiting):
        hint = " All ranks in the log were in it: the network or a GPU does not complete it, or one has no line here."
    statement = (
        f"{ranks_text(waiting).capitalize()} waited for {max(each.seconds for each in same):.0f} s in work "
        f"{work.number} ({work.operation}){_at(same)}, and the log does not show for whom.{hint}"
    )
    step = (
        "Give all ranks' logs, or run again with TORCH_NCCL_TRACE_BUFFER_SIZE=2000; under gpuwatch launch the report "
        "names the rank and its line."
    )
    steps = [step, *(["Test the links and GPUs of these nodes: gpuwatch check."] if "network" in hint else [])]
    lines = [each.line for each in same[:2]]
    for line, found in [pair for pair in facts.explained if pair[1].own][:2]:  # it may be why, or an old story
        statement += f" The log also says: {_writer(line)}{found.sentence}."
        steps, lines = [found.next, *steps], [*lines, line]
    return _verdict(VerdictKind.HANG, statement, steps, lines, certainty=Certainty.UNKNOWN)


def _writer(line: LogLine) -> str:
    """`rank 3: `, `node7: `; "" where the line does not say it."""
    return f"rank {line.rank}: " if line.rank is not None else f"{line.host}: " if line.host else ""


def _explained(facts: LogFacts) -> Verdict | None:
    """Lines that only say that something failed elsewhere."""
    if not facts.explained:
        return None
    sentences = "; ".join(dict.fromkeys(f"{_writer(line)}{found.sentence}" for line, found in facts.explained[:3]))
    statement = f"The log does not show which rank failed first. It says: {sentences}."
    steps = list(dict.fromkeys(found.next for _, found in facts.explained[:3]))
    lines = [line for line, _ in facts.explained[:3]]
    return _verdict(VerdictKind.UNKNOWN, statement, steps, lines, certainty=Certainty.UNKNOWN)


def _nothing() -> Verdict:
    step = "Give the logs of all ranks and nodes, with what SLURM and torchrun printed."
    statement = "The logs do not show why the job ended: no line in them is a known failure."
    return _verdict(VerdictKind.UNKNOWN, statement, [step], [], certainty=Certainty.UNKNOWN)


def _verdict(
    kind: VerdictKind,
    statement: str,
    steps: list[str],
    lines: list[LogLine],
    *,
    ranks: list[int] | None = None,
    host: str = "",
    certainty: Certainty = Certainty.SUPPORTED,
) -> Verdict:
    """`ranks`: those at fault; one is the verdict's, several are beside each other."""
    ranks = ranks or []
    several = (
        [ConcurrentOrigin(rank, "", "", None, "", text="see the statement") for rank in ranks] if ranks[1:] else []
    )
    rank = ranks[0] if len(ranks) == 1 else None
    return Verdict(
        kind,
        statement,
        certainty,
        rank=rank,
        host=host or None,
        evidence=_evidence(*lines),
        next=steps,
        concurrent=several,
    )
