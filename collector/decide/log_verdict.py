"""The verdict of a job from its logs alone: who was first, as far as they show it, and what to do. Pure.

A log is weaker than a recorder. It may be of some ranks only, and its lines are buffered. So nothing is established
here, and nothing is concluded from a rank that says nothing.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from ...core.codes import Certainty, VerdictKind
from ...core.gpu.counters import XIDS
from ...core.known_errors import explain
from ..ends.kernel_kills import killed_step
from ..facts.log_facts import LogFacts, LoggedXid, RaisedError
from ..facts.words import first_line
from ..report.rank_states import signal_name
from ..report.sentence_parts import grouped, ranks_text
from ..report.verdict import Verdict
from .log_waits import mismatch, never_came, waited
from .log_words import from_lines, writer_of

_SIGNALS = (-11, -7, -4, -8)
"""SIGSEGV, SIGBUS, SIGILL, SIGFPE: a process does them to itself. SIGKILL and SIGABRT may follow from others."""
_NOT_TORCHRUNS = (*_SIGNALS, -9, -6)
"""With SIGKILL and SIGABRT. torchrun sends healthy ranks SIGTERM or SIGINT, and SIGKILL only after it has noted who
failed."""
_OF_AN_ERROR = 1
"""Python's exit code after any error, which a rank may have raised because of another. A higher one is the script's."""
_NOT_THE_JOBS = re.compile(r"Killed process \d+ \((?!python|pt_|ray|torch|train)[^)]*\)|StepId=\d+\.extern")
_SEEN_BEFORE = "Look at what {} printed before; python -X faulthandler shows its line."
_MONITORED = re.compile(r"Ranks? (\d[\d, ]*) failed to pass monitoredBarrier")
_NODE_LOST = re.compile(r"Node failure on (?P<node>\S+)|ON (?P<node_2>\S+) CANCELLED AT \S+ DUE TO NODE FAILURE")


def log_verdict(facts: LogFacts) -> Verdict:
    """The verdict of all files together; `unknown` where they do not say it, or say several things."""
    lost = _lost_node(facts)
    if lost is not None:
        return lost
    rules = (_bad_gpu, _out_of_memory, _raised, _signalled, _barrier, mismatch, never_came)
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
        or waited(facts)
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


def _lost_node(facts: LogFacts) -> Verdict | None:
    for line, found in facts.explained:
        if (match := _NODE_LOST.search(line.text)) is not None:
            node = match["node"] or match["node_2"]
            statement = f"SLURM lost node {node} and ended the job."
            return from_lines(VerdictKind.LOST, statement, [found.next], [line], host=node)
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
    return from_lines(VerdictKind.LOST, statement, [means.next], [line], host=line.host)


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
    return from_lines(VerdictKind.LOST, statement, [step], lines, host=hosts[0] if len(hosts) == 1 else "")


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
        return from_lines(VerdictKind.CRASH, statement, steps, lines, certainty=Certainty.UNKNOWN)
    same = next(iter(alike.values()))
    numbers = sorted({one.rank for one in same if one.rank is not None})
    who = _who(same)
    others = sorted({one.rank for one in raised if one.why == "follows" and one.rank is not None} - set(numbers))
    followed = f" {ranks_text(others).capitalize()} failed because of it." if others and numbers else ""
    statement = f"{who[:1].upper()}{who[1:]} raised {_error(same[0])}.{followed}"
    return from_lines(VerdictKind.CRASH, statement, steps, [one.line for one in same], ranks=numbers)


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
        return from_lines(VerdictKind.LOST, statement, [step], [failure.line], ranks=[failure.rank], host=failure.host)
    tasks = {(end.host, end.tasks): end for end in facts.ends}
    if failed or len(tasks) != 1:
        return None
    (end,) = tasks.values()
    if not end.tasks.isdigit() or end.how.startswith(("Exited", "Out Of Memory")):
        return None
    statement = f"Task {end.tasks} on {end.host} ended by itself: {end.how.lower()}."
    step = _SEEN_BEFORE.format("that task")
    return from_lines(VerdictKind.LOST, statement, [step], [end.line], host=end.host)


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
        return from_lines(VerdictKind.LOST, statement, [step], lines, certainty=Certainty.UNKNOWN)
    statement = f"torchrun saw rank {first.rank} end first, {'by' if first.code < 0 else 'with'} {name}."
    kind = VerdictKind.LOST if first.code < 0 else VerdictKind.CRASH
    return from_lines(kind, statement, [step], [first.line], ranks=[first.rank], host=first.host)


def _barrier(facts: LogFacts) -> Verdict | None:
    """torch's monitored barrier says itself who did not come."""
    for line, found in facts.explained:
        if (match := _MONITORED.search(line.text)) is not None:
            numbers = [int(number) for number in re.findall(r"\d+", match[1])]
            statement = f"{ranks_text(numbers).capitalize()} did not reach a monitored barrier."
            return from_lines(VerdictKind.HANG, statement, [found.next], [line], ranks=numbers)
    return None


def _ended_from_outside(facts: LogFacts) -> Verdict | None:
    """A time limit or a preemption."""
    for line, found in facts.explained:
        if "CANCELLED AT" in line.text:
            sentence = f"{found.sentence[:1].upper()}{found.sentence[1:]}."
            return replace(from_lines(VerdictKind.INTERRUPTED, sentence, [found.next], [line]), signal="SIGTERM")
    return None


def _explained(facts: LogFacts) -> Verdict | None:
    """Lines that only say that something failed elsewhere."""
    if not facts.explained:
        return None
    sentences = "; ".join(dict.fromkeys(f"{writer_of(line)}{found.sentence}" for line, found in facts.explained[:3]))
    statement = f"The log does not show which rank failed first. It says: {sentences}."
    steps = list(dict.fromkeys(found.next for _, found in facts.explained[:3]))
    lines = [line for line, _ in facts.explained[:3]]
    return from_lines(VerdictKind.UNKNOWN, statement, steps, lines, certainty=Certainty.UNKNOWN)


def _nothing() -> Verdict:
    step = "Give the logs of all ranks and nodes, with what SLURM and torchrun printed."
    statement = "The logs do not show why the job ended: no line in them is a known failure."
    return from_lines(VerdictKind.UNKNOWN, statement, [step], [], certainty=Certainty.UNKNOWN)
