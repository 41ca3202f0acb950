"""The report for a terminal: the verdict, the table of all ranks, then the numbers."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.text.console import TextConsole
from ..decide.words import one_on
from .frames_text import frames_text
from .lines import attempt_lines, cascade_lines, concurrent_lines, earlier_lines, first_text, trouble_lines
from .model import RankReport, Report
from .notices_text import print_notices
from .preflight_text import print_findings, print_stages
from .side_by_side import rank_to_show, side_by_side
from .stacks import stacks_text

_COLORS = {"clean": "bold green", "interrupted": "bold yellow", "unknown": "bold yellow"}
_MAX_COLUMNS = 8
_MAX_TABLE_ROWS = 64
_MAX_MATRIX_ROWS = 12


def render_text(
    report: Report, *, width: int = 110, color: bool = False, rank: int | None = None, warnings: bool = False
) -> str:
    """The whole report as text, `width` characters wide; `rank` chooses whose frames are shown.

    `warnings`: each row near overflow or in underflow is shown, too.
    """
    console = TextConsole(width, color=color)
    _head(console, report)
    preflight_first = report.run.check_only or report.verdict.kind == "preflight"
    if preflight_first:
        print_stages(console, report.preflight)
    _verdict(console, report)
    if preflight_first:
        print_findings(console, report.preflight, [report.verdict.statement, *report.verdict.evidence])
        _trouble(console, report)
        return console.text()
    _ranks(console, report)
    _stacks(console, report)
    _trouble(console, report)
    print_findings(console, report.preflight)
    print_notices(console, report, warnings=warnings)
    shown = rank_to_show(report, rank)
    if shown is not None and (report.verdict.kind != "clean" or rank is not None):
        _side_by_side(console, report, shown)
        _frames(console, shown)
    for traced in report.ranks if rank is None else [r for r in report.ranks if r.rank == rank]:
        _traces(console, traced)
    return console.text()


def _head(console: Console, report: Report) -> None:
    run = report.run
    nodes = f"{run.nnodes} node{'s' if run.nnodes != 1 else ''}"
    console.rule(f"gpuwatch report: run {run.id}, {run.world_size} rank{'s' if run.world_size != 1 else ''} on {nodes}")


def _verdict(console: Console, report: Report) -> None:
    verdict = report.verdict
    style = _COLORS.get(verdict.kind, "bold red")
    console.print(Text(f"VERDICT  {verdict.kind}, {verdict.certainty}", style=style))
    console.print(Text(verdict.statement, style="bold"))
    _list(console, "Why", verdict.evidence)
    if verdict.concurrent:
        _list(console, "At the same time", concurrent_lines(verdict.concurrent))
    if verdict.cascade:
        _list(console, "Because of it", cascade_lines(verdict.cascade))
    _list(console, "Next", verdict.next)
    _list(console, "Other attempts of this job", attempt_lines(report))
    _list(console, "Before this job was requeued", earlier_lines(report))
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


def _stacks(console: Console, report: Report) -> None:
    lines = list(stacks_text(report.ranks)) if report.verdict.kind == "hang" else []
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    if lines:
        console.print()


def _ranks(console: Console, report: Report) -> None:
    if not report.everyone:
        return
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


def _ranks_of_table(report: Report) -> list[RankReport]:
    """All ranks of a small job. Of a large one those that met something, that differ, or whose frames are there."""
    if len(report.ranks) <= _MAX_TABLE_ROWS:
        return report.ranks
    common = Counter(rank.state for rank in report.ranks).most_common(1)[0][0]
    named = [rank for rank in report.ranks if rank.rank == report.verdict.rank]
    met = [rank for rank in report.ranks if rank.first_anomaly is not None or rank.frames]
    differ = [rank for rank in report.ranks if rank.state != common or rank.error is not None]
    chosen = list({rank.rank: rank for rank in [*named, *met, *differ, *report.ranks[:1]]}.values())
    return sorted(chosen[:_MAX_TABLE_ROWS], key=lambda rank: rank.rank)


def _trouble(console: Console, report: Report) -> None:
    for line in trouble_lines(report):
        console.print(Text(line, style="yellow"))


def _number(number: int | None) -> str:
    return "-" if number is None or number < 0 else str(number)


def _side_by_side(console: Console, report: Report, shown: RankReport) -> None:
    """A column per rank."""
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


def _frames(console: Console, rank: RankReport) -> None:
    frames = rank.frames
    console.print()
    phases = {frame.phase for frame in frames}
    phase = f"{frames[-1].phase} " if len(phases) == 1 else ""
    console.print(
        Text(f"{one_on(rank.rank)}, batch {frames[-1].batch}: last {len(frames)} {phase}frames", style="bold")
    )
    console.print(Text(frames_text(frames)), soft_wrap=True)


def _traces(console: Console, rank: RankReport) -> None:
    for page in rank.traces:
        console.print()
        console.print(Text(f"Rank {rank.rank}, batch {page.batch} of {page.root}, traced: all frames", style="bold"))
        console.print(Text(frames_text(page.frames)), soft_wrap=True)
    if rank.traces_left_out:
        console.print(
            Text(
                f"{rank.traces_left_out} traced batches of rank {rank.rank} are in the run's store alone: "
                f"gpuwatch report --rank {rank.rank}"
            )
        )
