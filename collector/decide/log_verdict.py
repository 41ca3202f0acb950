"""The verdict of a job from its logs alone: who was first, as far as they show it, and what to do. Pure.

A log is weaker than a recorder. It may be of some ranks only, and its lines are buffered. So nothing is established
here, and nothing is concluded from a rank that says nothing.
"""

from __future__ import annotations

import re

from ...core.gpu.counters import XIDS
from ...core.verdicts import Certainty, VerdictKind
from ..facts.log_facts import LogFacts, RaisedError, TimedOutWork
from ..facts.log_lines import LogLine
from ..report.model import ConcurrentOrigin, Verdict
from ..report.sentence_parts import grouped, ranks_text
from .hang_groups import ODD_UNKNOWN, SAME_COLLECTIVES
from .words import first_line, signal_name

_SIGNALS = (-11, -7, -4, -8)
"""SIGSEGV, SIGBUS, SIGILL, SIGFPE: a process does them to itself. SIGKILL and SIGABRT may follow from others."""
_OF_ONE_SIZE = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"})
"""Collectives to which all ranks must give as many elements."""
_BETWEEN_TWO = frozenset({"SEND", "RECV"})
_MOST_LINES = 8
_MOST_LETTERS = 200
_MONITORED = re.compile(r"Ranks? (\d[\d, ]*) failed to pass monitoredBarrier")
_NODE_LOST = re.compile(r"Node failure on (?P<node>\S+)|ON (?P<node_2>\S+) CANCELLED AT \S+ DUE TO NODE FAILURE")


def log_verdict(facts: LogFacts) -> Verdict:
    """The verdict of all files together; `unknown` where they do not say it."""
    for rule in (
        _lost_node,
        _bad_gpu,
        _out_of_memory,
        _raised,
        _signalled,
        _own_fault,
        _barrier,
        _mismatch,
        _never_came,
    ):
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return _ended_from_outside(facts) or _waited(facts) or _explained(facts) or _nothing()


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
    """An XID that means that the GPU, its link or its memory is bad, if only one GPU has it."""
    known = ((xid, XIDS[xid.number]) for xid in facts.xids if xid.number in XIDS)
    bad = [(xid, means) for xid, means in known if means.grade == "fail"]
    if len({(xid.line.host, xid.bus) for xid, _ in bad}) != 1:
        return None
    (line, bus, number), means = bad[0]
    host = line.host
    where = f" of {host}" if host else ""
    statement = f"The driver{where} reported XID {number} ({means.meaning}) for its GPU at PCI {bus}."
    return _verdict(VerdictKind.LOST, statement, [means.next], [xid.line for xid, _ in bad], host=host)


def _out_of_memory(facts: LogFacts) -> Verdict | None:
    tasks = [end for end in facts.ends if end.how == "Out Of Memory"]
    told = [(line, found) for line, found in facts.explained if "for lack of host memory" in found.sentence]
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
    own = [raised for raised in facts.raised if raised.is_own]
    alike = grouped(own, lambda raised: (raised.error, re.sub(r"\d+", "0", first_line(raised.message))))
    if not alike:
        return None
    steps = list(dict.fromkeys(found.next for _, found in facts.explained if found.own))
    steps = steps or ["The script itself failed: read its traceback in the log."]
    if len(alike) > 1:
        each = "; ".join(f"{_who(some)} raised {_error(some[0])}" for some in alike.values())
        statement = f"Ranks raised different errors, and the log does not show which was first: {each}."
        lines = [some[0].line for some in alike.values()]
        return _verdict(VerdictKind.CRASH, statement, steps, lines, certainty=Certainty.UNKNOWN)
    raised = next(iter(alike.values()))
    numbers = sorted({one.rank for one in raised if one.rank is not None})
    who = _who(raised)
    others = sorted({each.rank for each in facts.raised if not each.is_own and each.rank is not None} - set(numbers))
    followed = f" {ranks_text(others).capitalize()} failed because of it." if others and numbers else ""
    statement = f"{who[:1].upper()}{who[1:]} raised {_error(raised[0])}.{followed}"
    return _verdict(VerdictKind.CRASH, statement, steps, [one.line for one in raised], ranks=numbers)


def _who(raised: list[RaisedError]) -> str:
    numbers = sorted({one.rank for one in raised if one.rank is not None})
    return ranks_text(numbers) if numbers else "the script"


def _error(raised: RaisedError) -> str:
    message = first_line(raised.message)
    return f"{raised.error}{f': {message}' if message else ''}{f', at {raised.place}' if raised.place else ''}"


def _signalled(facts: LogFacts) -> Verdict | None:
    """One rank that ended itself by a signal, while others only followed."""
    failed = {failure.rank: failure for failure in facts.failures if failure.code in _SIGNALS}
    tasks = [end for end in facts.ends if end.how != "Out Of Memory"]
    if len(failed) == 1:
        (failure,) = failed.values()
        name = signal_name(-failure.code)
        statement = f"Rank {failure.rank} on {failure.host} was killed by {name}."
        step = f"Look at what rank {failure.rank} printed before; python -X faulthandler shows its line."
        return _verdict(VerdictKind.LOST, statement, [step], [failure.line], ranks=[failure.rank], host=failure.host)
    if not failed and len({(end.host, end.tasks) for end in tasks}) == 1 and tasks[0].tasks.isdigit():
        end = tasks[0]
        statement = f"Task {end.tasks} on {end.host} ended by itself: {end.how.lower()}."
        step = "Look at what that task printed before; python -X faulthandler shows its line."
        return _verdict(VerdictKind.LOST, statement, [step], [end.line], host=end.host)
    return None


def _own_fault(facts: LogFacts) -> Verdict | None:
    """A known fault of one rank's or one host's own, if only one has it."""
    own = [(line, found) for line, found in facts.explained if found.own and "NVRM: Xid" not in line.text]
    if not own:
        return None
    kinds = grouped(own, lambda pair: pair[1].next)
    if len(kinds) > 1:
        each = "; ".join(f"{_writer([line for line, _ in some])}{some[0][1].sentence}" for some in kinds.values())
        statement = f"The log does not show which of these was first: {each}."
        lines = [some[0][0] for some in kinds.values()]
        return _verdict(VerdictKind.CRASH, statement, [*kinds], lines, certainty=Certainty.UNKNOWN)
    found, same = own[0][1], [line for line, _ in own]
    numbers = sorted({line.rank for line in same if line.rank is not None})
    hosts = sorted({line.host for line in same if line.host})
    who = _writer(same)
    who = f"{who[:1].upper()}{who[1:]}" if numbers else who
    sentence = found.sentence if who else f"{found.sentence[:1].upper()}{found.sentence[1:]}"
    host = hosts[0] if len(hosts) == 1 else ""
    return _verdict(VerdictKind.CRASH, f"{who}{sentence}.", [found.next], same, ranks=numbers, host=host)


def _writer(lines: list[LogLine]) -> str:
    """`rank 3: `, `node7: `; "" where the lines do not say it."""
    numbers = sorted({line.rank for line in lines if line.rank is not None})
    hosts = sorted({line.host for line in lines if line.host})
    return f"{ranks_text(numbers)}: " if numbers else f"{hosts[0]}: " if len(hosts) == 1 else ""


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
        kinds = grouped(works, _kind_of)
        if len(kinds) < 2:
            continue
        parts = sorted(kinds.items(), key=lambda pair: (-len(pair[1]), pair[1][0].rank))
        each = [f"{ranks_text(_ranks(some))} {_kind(*kind)}" for kind, some in parts]
        inside = f"As work {number} of group {group}, {', '.join(each)}"
        most, rest = parts[0][1], [work for _, some in parts[1:] for work in some]
        odd = _ranks(rest) if len(most) > 2 * len(rest) else []
        named = f"{ranks_text(odd).capitalize()} differ{'s' if len(odd) == 1 else ''} from all others." if odd else ""
        step = f"{SAME_COLLECTIVES} in the same order: look for a call that only some of them make, as inside an if."
        statement = f"{inside}: the ranks do not issue the same collectives. {named or ODD_UNKNOWN}"
        certainty = Certainty.SUPPORTED if odd else Certainty.UNKNOWN
        lines = [some[0].line for some in kinds.values()]
        return _verdict(VerdictKind.HANG, statement, [step], lines, ranks=odd, certainty=certainty)
    return None


def _meetings(facts: LogFacts) -> list[tuple[tuple[str, int], list[TimedOutWork]]]:
    """The works of each group that is told, the lowest number first."""
    works = [work for work in facts.timed_out if work.group and work.operation not in _BETWEEN_TWO]
    told = {(work.rank, work.group) for work in works}
    works += [  # the line of its watchdog is missing
        TimedOutWork(last.rank, last.group, last.ended + 1, "", -1, 0.0, last.line)
        for last in facts.progress
        if last.timed_out and (last.rank, last.group) not in told and -1 <= last.ended < last.begun
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
    for (group, number), works in _meetings(facts):
        last = {told.rank: told for told in facts.progress if told.group == group}
        waiting = _ranks(works)
        timed_out = {work.rank for work in facts.timed_out if work.group == group}
        behind = [told for rank, told in sorted(last.items()) if told.begun < number and rank not in timed_out]
        if not behind or len({work.operation for work in works}) > 1:
            continue
        numbers, begun = [told.rank for told in behind], sorted({told.begun for told in behind})
        waited = max(work.seconds for work in works)
        for_how_long = f" for {waited:.0f} s" if waited else ""
        their = "its" if len(numbers) == 1 else "their"
        ended = (
            f"{their} last begun is {begun[0]}" if len(begun) == 1 else f"{their} last begun are {begun[0]} and more"
        )
        operation = f" ({works[0].operation})" if works[0].operation else ""
        statement = (
            f"{ranks_text(numbers).capitalize()} had not begun work {number}{operation} of group {group}, in which "
            f"{ranks_text(waiting)} waited{for_how_long}{_at(works)}: {ended}."
        )
        elsewhere = [raised for raised in facts.raised if raised.rank in numbers and not raised.is_own]
        lines = [*(told.line for told in behind), *(work.line for work in works[:2])]
        if elsewhere and len(waiting) <= 2 * len(numbers):
            at = f" (at {elsewhere[0].place})" if elsewhere[0].place else ""
            statement += (
                f" They waited for others themselves{at}: the ranks do not issue the same collectives. {ODD_UNKNOWN}"
            )
            step = (
                f"{SAME_COLLECTIVES} in the same order: look for a call that only some of them make, as inside an if."
            )
            return _verdict(VerdictKind.HANG, statement, [step], lines, certainty=Certainty.UNKNOWN)
        statement += " Or a rank stood inside of that call." if not elsewhere else ""
        step = f"Look at what {ranks_text(numbers)} did then: data loading, a save, an evaluation, an early return."
        return _verdict(VerdictKind.HANG, statement, [step], lines, ranks=numbers)
    return None


def _at(works: list[TimedOutWork]) -> str:
    places = sorted({work.place for work in works if work.place})
    return f" at {places[0]}" if len(places) == 1 else ""


def _ended_from_outside(facts: LogFacts) -> Verdict | None:
    """A time limit or a preemption, if no rank waited in vain before."""
    for line, found in facts.explained:
        if "CANCELLED AT" in line.text and not facts.timed_out:
            sentence = f"{found.sentence[:1].upper()}{found.sentence[1:]}."
            return _verdict(VerdictKind.INTERRUPTED, sentence, [found.next], [line])
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
    if silent and len(silent) <= max(1, facts.world_size // 8):
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
    return _verdict(VerdictKind.HANG, statement, steps, lines, certainty=Certainty.UNKNOWN)


def _explained(facts: LogFacts) -> Verdict | None:
    """Lines that only say that something failed elsewhere."""
    if not facts.explained:
        return None
    sentences = "; ".join(dict.fromkeys(found.sentence for _, found in facts.explained[:3]))
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
