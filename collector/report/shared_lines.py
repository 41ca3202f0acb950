"""Lines of the report that the text and the page have in common. A line has no markup."""

from __future__ import annotations

import re

from ...core.events.alarm_evidence import CaptureFile
from ...core.frames import FramePhase, module_text
from ...core.identity import rank_name
from ...core.text import ranks_text, size_text
from .model import RankAnomaly, RunReport
from .sentence_parts import grouped
from .verdict import CascadedRank, ConcurrentOrigin

_MAX_CASCADE = 8
_MAX_ATTEMPTS = 8


def capture_lines(file: CaptureFile | None) -> list[str]:
    """The file of `--capture` and its size, or why there is none."""
    if file is None:
        return []
    if file.refused:
        return [f"not written: {file.refused}"]
    return ["; ".join([f"{file.path}, {size_text(file.bytes)}: {file.module}", *file.notes])]


def concurrent_lines(concurrent: list[ConcurrentOrigin]) -> list[str]:
    """Ranks that met the same share a line, because there can be hundreds."""
    lines = []
    for one, *more in grouped(concurrent, _found_by).values():
        who = ranks_text(other.rank for other in (one, *more)) if more else f"{rank_name(one.rank)} on {one.host}"
        lines.append(f"{who}: {_found_by(one)}")
    return lines


def _found_by(one: ConcurrentOrigin) -> str:
    return one.text or f"{one.value} in {one.role} of {module_text(one.module, one.cls)}"


def attempt_lines(report: RunReport) -> list[str]:
    """Lines on the last attempts; there can be hundreds."""
    left = max(0, len(report.attempts) - _MAX_ATTEMPTS)
    lines = [f"attempt {other.attempt}: {other.statement}" for other in report.attempts[left:]]
    return [*([f"{left} more in report.json"] if left else []), *lines]


def earlier_lines(report: RunReport) -> list[str]:
    """How the earlier lives of a requeued job ended."""
    return [f"{life.run}{f', {life.kind}' if life.kind else ''}: {life.statement}" for life in report.run.earlier]


def cascade_lines(cascade: list[CascadedRank]) -> list[str]:
    """Ranks that ended in the same way share a line, because there can be hundreds."""
    alike = grouped(cascade, lambda entry: entry.how)
    lines = []
    for how, entries in list(alike.items())[:_MAX_CASCADE]:
        if len(entries) > 1:
            how = re.sub("^is a victim", "are victims", re.sub("^was stopped", "were stopped", how))
        lines.append(f"{ranks_text(entry.rank for entry in entries)} {how}")
    left = sum(map(len, list(alike.values())[_MAX_CASCADE:]))
    return [*lines, *([f"and {left} more ranks"] if left else [])]


def first_text(first: RankAnomaly | None) -> str:
    """`batch 7: nan, fc1 output`: the row in which the first non-finite value was seen."""
    if first is None:
        return "-"
    at = first.seen_in
    if first.phase == FramePhase.LOSS:
        return f"batch {first.batch}: {first.value}, the loss"
    module, cls, role = (at.module, at.cls, at.role) if at is not None else (first.module, first.cls, first.role)
    return f"batch {first.batch}: {first.value}, {module or f'(root) {cls}'} {role}"
