"""The report for a terminal: the verdict, the table of all ranks, then the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.frames import HEADER, NAME_INDENT, Frame, FramePhase, Row, format_row, module_text
from ...core.identity import rank_name
from ...core.text import ranks_text
from ...core.verdicts import ReportSection
from .model import CascadedRank, ConcurrentOrigin, RankAnomaly, RankReport, RunReport
from .notices_text import (
    print_insights,
    print_nodes,
    print_notes,
    print_steps,
    print_title,
    print_warnings,
    share_text,
)
from .preflight_text import print_findings, print_stages
from .sections import is_about_preflight, sections_of_text
from .sentence_parts import TextConsole, one_on
from .side_by_side import rank_to_show, side_by_side
from .stack_groups import stacks_text

# Frames as a report prints them: the 21-frame table, with the gradients of one module under one title.
#
# abs min  abs max  metadata
# encoder.fc1 Linear
# 3.82e-08 2.17e+00 weight
# 8.11e-02 4.10e+01 output
# encoder.fc1 Linear (backward)
# 0.00e+00 6.10e-05 grad output zeros 12% subnormal 3%
# 0.00e+00      inf grad weight


def frames_text(frames: list[Frame]) -> str:
    """The table of several frames under its header."""
    lines = [HEADER]
    before: tuple[str, str] | None = None
    for frame in frames:
        if (
            frame.module,
            frame.phase,
        ) != before or frame.phase == FramePhase.FORWARD:  # each call of a forward has its own title
            lines.append(f"{NAME_INDENT} {title_of(frame)}")
        before = (frame.module, frame.phase)
        lines += [row_text(row) for row in frame.rows]
    return "\n".join(lines)


def title_of(frame: Frame) -> str:
    """Name and class, and the phase if that is not the forward."""
    return frame.title if frame.phase == FramePhase.FORWARD else f"{frame.title} ({frame.phase})"


def row_text(row: Row) -> str:
    """A row as a line, with the shares of zeros and subnormals where they were counted."""
    shares = [f"{name} {share_text(share)}" for name, share in _shares(row) if share]
    return " ".join([format_row(row), *shares])


def _shares(row: Row) -> list[tuple[str, float | None]]:
    return [("zeros", row.zeros), ("subnormal", row.subnormals)]


# Lines of the report that the text and the page have in common. A line has no markup.

_MAX_CASCADE = 8
_MAX_ATTEMPTS = 8


def concurrent_lines(concurrent: list[ConcurrentOrigin]) -> list[str]:
    """Ranks that met the same share a line, because there can be hundreds."""
    alike: dict[str, list[ConcurrentOrigin]] = {}
    for other in concurrent:
        found = other.text or f"{other.value} in {other.role} of {module_text(other.module, other.cls)}"
        alike.setdefault(found, []).append(other)
    return [
        f"{rank_name(others[0].rank)} on {others[0].host}: {found}"
        if len(others) == 1
        else f"{ranks_text([other.rank for other in others])}: {found}"
        for found, others in alike.items()
    ]


def attempt_lines(report: RunReport) -> list[str]:
    """The last ones; there can be hundreds."""
    left = max(0, len(report.attempts) - _MAX_ATTEMPTS)
    lines = [f"attempt {other.attempt}: {other.statement}" for other in report.attempts[left:]]
    return [*([f"{left} more in report.json"] if left else []), *lines]


def earlier_lines(report: RunReport) -> list[str]:
    """How the earlier lives of a requeued job ended."""
    return [f"{life.run}{f', {life.kind}' if life.kind else ''}: {life.statement}" for life in report.run.earlier]


def cascade_lines(cascade: list[CascadedRank]) -> list[str]:
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


def first_text(first: RankAnomaly | None) -> str:
    """`batch 7: nan, fc1 output`: the row in which the first non-finite value was seen."""
    if first is None:
        return "-"
    at = first.seen_in
    module, cls, role = (at.module, at.cls, at.role) if at is not None else (first.module, first.cls, first.role)
    return f"batch {first.batch}: {first.value}, {module or f'(root) {cls}'} {role}"


_MAX_COLUMNS = 8
_MAX_TABLE_ROWS = 64
_MAX_MATRIX_ROWS = 12


def render_text(
    report: RunReport, *, width: int = 110, color: bool = False, rank: int | None = None, warnings: bool = False
) -> str:
    """The whole report as text, `width` characters wide; `rank` chooses whose frames are shown.

    `warnings`: each row near overflow or in underflow is shown, too.
    """
    console = TextConsole(width, color=color)
    _head(console, report)
    if is_about_preflight(report):
        print_stages(console, report.preflight)
    shown = rank_to_show(report, rank)
    earlier = [*attempt_lines(report), *earlier_lines(report)]
    printers: dict[ReportSection, Callable[[], None]] = {
        ReportSection.VERDICT: lambda: _verdict(console, report),
        ReportSection.ATTEMPTS: lambda: _list(console, ReportSection.ATTEMPTS.heading, earlier),
        ReportSection.RANKS: lambda: _ranks(console, report),
        ReportSection.STACKS: lambda: _stacks(console, report),
        ReportSection.PREFLIGHT: lambda: print_findings(console, report),
        ReportSection.NOTES: lambda: print_notes(console, report),
        ReportSection.NODES: lambda: print_nodes(console, report),
        ReportSection.STEPS: lambda: print_steps(console, report),
        ReportSection.INSIGHTS: lambda: print_insights(console, report, warnings=warnings),
        ReportSection.WARNINGS: lambda: print_warnings(console, report),
        ReportSection.FRAMES: lambda: _frames(console, report, shown),
        ReportSection.BY_RANK: lambda: _traces(console, report, rank),
    }
    for section in sections_of_text(report, rank=rank, warnings=warnings):
        if section in printers:  # the page alone has the others
            printers[section]()
    return console.text()


def _head(console: Console, report: RunReport) -> None:
    run = report.run
    nodes = f"{run.nnodes} node{'s' if run.nnodes != 1 else ''}"
    console.rule(f"gpuwatch report: run {run.id}, {run.world_size} rank{'s' if run.world_size != 1 else ''} on {nodes}")


def _verdict(console: Console, report: RunReport) -> None:
    verdict = report.verdict
    console.print(Text(f"VERDICT  {verdict.kind}, {verdict.certainty}", style=f"bold {verdict.kind.tone}"))
    console.print(Text(verdict.statement, style="bold"))
    _list(console, "Why", verdict.evidence)
    if verdict.concurrent:
        _list(console, "At the same time", concurrent_lines(verdict.concurrent))
    if verdict.cascade:
        _list(console, "Because of it", cascade_lines(verdict.cascade))
    _list(console, "Next", verdict.next)
    console.print()


def _list(console: Console, title: str, items: list[str]) -> None:
    if not items:
        return
    console.print(Text(title, style="bold"))
    for item in items:
        lines = item.splitlines() or [""]
        console.print(Text(f"  - {lines[0]}"))
        for line in lines[1:]:
            console.print(Text(f"    {line}"), soft_wrap=True)


def _stacks(console: Console, report: RunReport) -> None:
    print_title(console, ReportSection.STACKS)
    for line in stacks_text(report.ranks):
        console.print(Text(line), soft_wrap=True)


def _ranks(console: Console, report: RunReport) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rank", "host", "device", "state", "step", "batch", "first non-finite value", "lost"):
        table.add_column(title, overflow="fold")
    rows = _ranks_of_table(report)
    for rank in [*rows, *report.processes]:
        lost = rank.lost.total
        exit_ = f" ({rank.exit})" if rank.exit not in (0, None) else ""
        table.add_row(
            rank.label,
            Text(rank.host),
            Text(rank.device or "-"),
            Text(rank.state + exit_),
            _number(rank.step),
            _number(rank.batch),
            Text(first_text(rank.first_anomaly)),
            str(lost),
            style="bold" if rank.rank == report.named else None,
        )
    console.print(table)
    if len(rows) < len(report.ranks):
        states = Counter(rank.state for rank in report.ranks)
        text = ", ".join(f"{number} {state}" for state, number in states.most_common(_MAX_COLUMNS))
        console.print(Text(f"{len(rows)} of {len(report.ranks)} ranks ({text}); all are in report.json"))


def _ranks_of_table(report: RunReport) -> list[RankReport]:
    """All ranks of a small job. Of a large one those that met something, that differ, or whose frames are there."""
    if len(report.ranks) <= _MAX_TABLE_ROWS:
        return report.ranks
    common = Counter(rank.state for rank in report.ranks).most_common(1)[0][0]
    named = [rank for rank in report.ranks if rank.rank == report.verdict.rank]
    met = [rank for rank in report.ranks if rank.first_anomaly is not None or rank.frames]
    differ = [rank for rank in report.ranks if rank.state != common or rank.error is not None]
    chosen = list({rank.rank: rank for rank in [*named, *met, *differ, *report.ranks[:1]]}.values())
    return sorted(chosen[:_MAX_TABLE_ROWS], key=lambda rank: rank.rank)


def _number(number: int | None) -> str:
    return "-" if number is None or number < 0 else str(number)


def _side_by_side(console: Console, report: RunReport, shown: RankReport) -> None:
    found = side_by_side(report, shown, _MAX_COLUMNS, _MAX_MATRIX_ROWS)
    if found is None:
        return
    console.print()
    console.print(Text(f"abs max of the {found.what} in batch {found.batch}, rank by rank", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module", overflow="fold")
    for rank in found.columns:
        own = rank.frames[-1].batch
        table.add_column(rank.name + (f"\nbatch {own}" if own != found.batch else ""), justify="right")
    for row in found.rows:
        table.add_row(Text(row.title), *(Text(cell.text, "bold red" if cell.bad else "") for cell in row.cells))
    console.print(table)
    if found.left_out:
        console.print(Text(f"{found.left_out} more ranks in report.json"))
    stored = [r for r in report.ranks if r.pages and not r.frames]
    if stored:
        console.print(Text(f"{len(stored)} more ranks in the run's store: gpuwatch report --rank N"))


def _frames(console: Console, report: RunReport, rank: RankReport | None) -> None:
    if rank is None:
        return
    _side_by_side(console, report, rank)
    frames = rank.frames
    console.print()
    phases = {frame.phase for frame in frames}
    phase = f"{frames[-1].phase} " if len(phases) == 1 else ""
    console.print(
        Text(f"{one_on(rank.rank)}, batch {frames[-1].batch}: last {len(frames)} {phase}frames", style="bold")
    )
    console.print(Text(frames_text(frames)), soft_wrap=True)


def _traces(console: Console, report: RunReport, asked: int | None) -> None:
    for rank in report.ranks if asked is None else [r for r in report.ranks if r.rank == asked]:
        for page in rank.traces:
            title = f"Rank {rank.rank}, batch {page.batch} of {page.root}, traced: all frames"
            console.print()
            console.print(Text(title, style="bold"))
            console.print(Text(frames_text(page.frames)), soft_wrap=True)
        if rank.traces_left_out:
            left = f"{rank.traces_left_out} traced batches of rank {rank.rank} are in the run's store alone"
            console.print(Text(f"{left}: gpuwatch report --rank {rank.rank}"))
