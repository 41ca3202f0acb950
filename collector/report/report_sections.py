"""Which sections a report has, and which of them are open. The text and the page print this one list."""

from __future__ import annotations

from collections.abc import Callable

from ...core.codes import ReportSection, VerdictKind
from .model import RunReport
from .notices_text import notice_lines, trouble_lines
from .shared_lines import attempt_lines, earlier_lines
from .side_by_side import can_be_compared

_MOST_OPEN_ROWS = 64
"""A table of more ranks is folded."""
_ON_THE_PAGE_ALONE = {
    *(ReportSection.ERRORS, ReportSection.HEAT, ReportSection.TIMELINE),
    *(ReportSection.LOST, ReportSection.VERSIONS, ReportSection.CODES),
}


def is_about_preflight(report: RunReport) -> bool:
    """Whether there was no training to report."""
    return report.run.check_only or report.verdict.kind.opens == ReportSection.PREFLIGHT


def sections_of(report: RunReport) -> list[ReportSection]:
    """The sections with content, in their order."""
    is_there = {**LINES, **_IS_THERE}
    return [section for section in ReportSection if is_there[section](report)]


def sections_of_text(report: RunReport, *, rank: int | None = None, warnings: bool = False) -> list[ReportSection]:
    """The same for the text, which cannot be folded: it omits sections that neither bear on the verdict nor were
    requested."""
    left_out = set(_ON_THE_PAGE_ALONE)
    if not warnings:
        left_out.add(ReportSection.WARNINGS)
    if not any(one.traces or one.traces_left_out for one in report.ranks):
        left_out.add(ReportSection.BY_RANK)
    if report.verdict.kind == VerdictKind.CLEAN and rank is None:
        left_out.add(ReportSection.FRAMES)
    if report.verdict.kind.opens != ReportSection.STACKS:
        left_out.add(ReportSection.STACKS)
    if is_about_preflight(report):
        left_out |= set(ReportSection) - {ReportSection.VERDICT, ReportSection.PREFLIGHT, ReportSection.NOTES}
    return [section for section in sections_of(report) if section not in left_out]


def is_open(report: RunReport, section: ReportSection) -> bool:
    """Whether the page shows it unfolded: the verdict's kind opens one, and findings open others."""
    return section == report.verdict.kind.opens or bool(section in _OPEN and _OPEN[section](report))


LINES: dict[ReportSection, Callable[[RunReport], list[str]]] = {
    ReportSection.ATTEMPTS: lambda report: [*attempt_lines(report), *earlier_lines(report)],
}
"""Sections that are a list of lines: the text and the page print these, and need nothing else of such a section."""

_IS_THERE: dict[ReportSection, Callable[[RunReport], object]] = {
    ReportSection.VERDICT: lambda report: True,
    ReportSection.RANKS: lambda report: report.everyone,
    ReportSection.STACKS: lambda report: any(rank.stack for rank in report.ranks),
    ReportSection.ERRORS: lambda report: any(rank.error is not None for rank in report.ranks),
    ReportSection.PREFLIGHT: lambda report: (
        report.preflight.findings
        or report.preflight.bandwidth
        or (report.preflight.stages and not is_about_preflight(report))  # else they stand beside the verdict
    ),
    ReportSection.NOTES: lambda report: [*trouble_lines(report), *notice_lines(report)],
    ReportSection.NODES: lambda report: report.telemetry is not None,
    ReportSection.STEPS: lambda report: report.steps is not None,
    ReportSection.INSIGHTS: lambda report: report.insights,
    ReportSection.WARNINGS: lambda report: any(rank.warnings for rank in report.ranks),
    ReportSection.HEAT: can_be_compared,
    ReportSection.TIMELINE: lambda report: report.timeline,
    ReportSection.FRAMES: lambda report: any(rank.frames for rank in report.everyone),
    ReportSection.BY_RANK: lambda report: any(r.frames or r.traces or r.traces_left_out for r in report.ranks),
    ReportSection.LOST: lambda report: any(rank.lost.total for rank in report.ranks),
    ReportSection.VERSIONS: lambda report: True,
    ReportSection.CODES: lambda report: True,
}
assert {*LINES, *_IS_THERE} == set(ReportSection) and not LINES.keys() & _IS_THERE.keys()

_OPEN: dict[ReportSection, Callable[[RunReport], object]] = {
    ReportSection.RANKS: lambda report: len(report.ranks) <= _MOST_OPEN_ROWS,
    ReportSection.NOTES: lambda report: True,
    ReportSection.NODES: lambda report: report.telemetry is not None and report.telemetry.notable,
    ReportSection.STEPS: lambda report: report.steps is not None and (report.steps.stragglers or report.steps.trouble),
    ReportSection.INSIGHTS: lambda report: True,
    ReportSection.HEAT: lambda report: True,
    ReportSection.CODES: lambda report: True,
}
