"""The verdicts of logs whose ranks waited: in different collectives, for some that never came, or for nobody known."""

from __future__ import annotations

from ...core.codes import Certainty, VerdictKind
from ..ends.hang_groups import LOOK_FOR_AN_IF, ODD_UNKNOWN
from ..facts.log_facts import LogFacts, TimedOutWork
from ..report.sentence_parts import grouped, ranks_text
from ..report.verdict import Verdict
from .log_words import from_lines, writer_of

_OF_ONE_SIZE = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"})
"""Collectives to which all ranks must give as many elements."""
_BETWEEN_TWO = frozenset({"SEND", "RECV", "COALESCED"})


def mismatch(facts: LogFacts) -> Verdict | None:
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
        return from_lines(VerdictKind.HANG, statement, [LOOK_FOR_AN_IF], lines, ranks=odd, certainty=certainty)
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


def never_came(facts: LogFacts) -> Verdict | None:
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
            return from_lines(VerdictKind.HANG, statement + ODD_UNKNOWN, [LOOK_FOR_AN_IF], lines, certainty=unknown)
        statement += " Or a rank stood inside of that call." if not elsewhere else ""
        step = f"Look at what {ranks_text(numbers)} did then: data loading, a save, an evaluation, an early return."
        return from_lines(VerdictKind.HANG, statement, [step], lines, ranks=numbers)
    return None


def _at(works: list[TimedOutWork]) -> str:
    places = sorted({work.place for work in works if work.place})
    return f" at {places[0]}" if len(places) == 1 else ""


def waited(facts: LogFacts) -> Verdict | None:
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
        statement += f" The log also says: {writer_of(line)}{found.sentence}."
        steps, lines = [found.next, *steps], [*lines, line]
    return from_lines(VerdictKind.HANG, statement, steps, lines, certainty=Certainty.UNKNOWN)
