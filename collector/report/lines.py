"""Lines of the report that the text and the page have in common. A line has no markup."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.frames import module_text
from ...core.recorder.lone_process import rank_name
from ...core.text.ranks_text import ranks_text
from ...core.versions.notes import notes_on
from ..decide.verdict_model import Cascade, Concurrent
from .model import FirstAnomaly, Report

_MAX_CASCADE = 8
_MAX_ATTEMPTS = 8
_CLOCK_OFF_S = 1.0
_TURNED_AWAY = {
    "refused": "clients with another key or of another run",
    "from_viewers": "messages of viewers",
    "replayed": "hellos that were heard before",
    "disbelieved": "messages about another node's ranks",
    "malformed": "messages that could not be read",
}


def concurrent_lines(concurrent: list[Concurrent]) -> list[str]:
    """Ranks that met the same share a line, because there can be hundreds."""
    alike: dict[str, list[Concurrent]] = {}
    for other in concurrent:
        found = other.text or f"{other.value} in {other.role} of {module_text(other.module, other.cls)}"
        alike.setdefault(found, []).append(other)
    return [
        f"{rank_name(others[0].rank)} on {others[0].host}: {found}"
        if len(others) == 1
        else f"{ranks_text([other.rank for other in others])}: {found}"
        for found, others in alike.items()
    ]


def attempt_lines(report: Report) -> list[str]:
    """The last ones; there can be hundreds."""
    left = max(0, len(report.attempts) - _MAX_ATTEMPTS)
    lines = [f"attempt {other.attempt}: {other.statement}" for other in report.attempts[left:]]
    return [*([f"{left} more in report.json"] if left else []), *lines]


def earlier_lines(report: Report) -> list[str]:
    """How the earlier lives of a requeued job ended."""
    return [f"{life.run}{f', {life.kind}' if life.kind else ''}: {life.statement}" for life in report.run.earlier]


def cascade_lines(cascade: list[Cascade]) -> list[str]:
    """Ranks that ended in the same way share a line, because there can be hundreds."""
    alike: dict[str, list[int]] = {}
    for entry in cascade:
        alike.setdefault(entry.how, []).append(entry.rank)
    lines = [f"{ranks_text(ranks)} {how if len(ranks) == 1 else _plural(how)}" for how, ranks in alike.items()]
    left = sum(map(len, list(alike.values())[_MAX_CASCADE:]))
    return [*lines[:_MAX_CASCADE], *([f"and {left} more ranks"] if left else [])]


def _plural(how: str) -> str:
    for one, many in (("is a victim", "are victims"), ("was stopped", "were stopped")):
        if how.startswith(one):
            return many + how.removeprefix(one)
    return how


def first_text(first: FirstAnomaly | None) -> str:
    """`batch 7: nan, fc1 output`: the row in which the first non-finite value was seen."""
    if first is None:
        return "-"
    at = first.seen_in
    module, cls, role = (at.module, at.cls, at.role) if at is not None else (first.module, first.cls, first.role)
    return f"batch {first.batch}: {first.value}, {module or f'(root) {cls}'} {role}"


def trouble_lines(report: Report) -> Iterator[str]:
    """What of gpuwatch itself went wrong or did not reach this report, and clocks that are too far apart to compare."""
    for node in report.nodes:
        if node.clock_offset_ns is not None and abs(node.clock_offset_ns) > _CLOCK_OFF_S * 1e9:
            off = -node.clock_offset_ns / 1e9
            yield f"the clock of {node.host} is {off:+.1f} s off the collector's: mind it in logs"
    yield from notes_on(report.run.versions.get("torch", ""))
    for rank in report.everyone:
        for fault in rank.faults:
            yield f"gpuwatch's own fault on {rank_name(rank.rank)}: {fault}"
    untold = report.collector.get("metrics_faults", 0)
    if untold:
        yield f"gpuwatch's own fault in the collector: the metrics could not be told, {untold} times (its log says why)"
    unwritten = report.collector.get("unwritten", 0)
    if unwritten:
        yield f"{unwritten} messages could not be written to the run store (is the disk full?)"
    found = [f"{report.collector[key]} {what}" for key, what in _TURNED_AWAY.items() if report.collector.get(key)]
    if found:
        yield f"the collector turned away: {', '.join(found)}"
