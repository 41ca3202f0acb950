"""The report for a terminal: the verdict, the table of all ranks, then the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ...core.codes import ReportSection, VerdictKind
from ...core.frames import Frame
from .model import RankReport, RunReport
from .notices_text import (
    PLAIN,
    insight_notes,
    last_minute_table,
    node_notes,
    notes,
    print_findings,
    print_stages,
    step_notes,
    warned_rows_table,
)
from .operation_line import evidence_lines
from .rank_states import state_text
from .report_sections import LINES, is_about_preflight, sections_of_text
from .sentence_parts import TextConsole, WrappedText, counted, dim_codes, list_item, one_on
from .shared_lines import capture_lines, cascade_lines, concurrent_lines, first_text
from .side_by_side import SideBySide, frames_text, rank_to_show, side_by_side, stacks_text
from .verdict import Verdict

_MAX_COLUMNS = 8
_MAX_TABLE_ROWS = 64
_MAX_MATRIX_ROWS = 12
_GAP = 2
_MODULE_WIDTH = 20
"""A module's name goes on in the next line; narrower, it is hard to read."""


def render_text(
    report: RunReport, *, width: int = 80, color: bool = False, rank: int | None = None, warnings: bool = False
) -> str:
    """The whole report as text, `width` characters wide; `rank` chooses whose frames are shown.

    `warnings`: each row near overflow or in underflow is shown, too.
    """
    console = TextConsole(width, color=color)
    print_title(console, report)
    for section in sections_of_text(report, rank=rank, warnings=warnings):
        print_section(console, report, section, rank=rank, warnings=warnings)
    return console.text()


def print_title(console: Console, report: RunReport) -> None:
    """The line above the report, and the stages of a preflight that the report is about."""
    run, nodes = report.run, counted(report.run.nnodes, "node")
    console.rule(f"gpuwatch report: run {run.id}, {counted(run.world_size, 'rank')} on {nodes}")
    if is_about_preflight(report):
        print_stages(console, report.preflight)


def print_section(
    console: Console, report: RunReport, section: ReportSection, *, rank: int | None = None, warnings: bool = False
) -> None:
    """Print one of `sections_of_text` whole. `rank` and `warnings` as for `render_text`."""
    if section in LINES:
        print_list(console, section.heading, LINES[section](report))
        return
    slow = report.steps.stragglers if report.steps is not None else []
    printers: dict[ReportSection, Callable[[], None]] = {
        ReportSection.VERDICT: lambda: _verdict(console, report),
        ReportSection.RANKS: lambda: _ranks(console, report, rank),
        ReportSection.STACKS: lambda: print_block(console, section.heading, "\n".join(stacks_text(report.ranks))),
        ReportSection.PREFLIGHT: lambda: print_findings(console, report),
        ReportSection.NOTES: lambda: _titled(console, section, notes(report)),
        ReportSection.NODES: lambda: _titled(console, section, [*last_minute_table(report), *node_notes(report)]),
        ReportSection.STEPS: lambda: _titled(
            console, section, step_notes(report), "bold red" if any(one.loud for one in slow) else "bold"
        ),
        ReportSection.INSIGHTS: lambda: _titled(console, section, insight_notes(report, warnings=warnings)),
        ReportSection.WARNINGS: lambda: _titled(console, section, warned_rows_table(report)),
        ReportSection.FRAMES: lambda: _frames(console, report, rank_to_show(report, rank)),
        ReportSection.BY_RANK: lambda: _traces(console, report, rank),
    }
    printers[section]()


_SCREEN = 20
"""Lines of a text of which a terminal of 24 lines shows all."""


def with_answer(report: RunReport, text: str, *, width: int = 80, color: bool = False) -> str:
    """The text, and once more the verdict, its cause and the first next step, if it has scrolled its beginning away."""
    return f"{text}\n\n{answer_text(report, width=width, color=color)}" if scrolls(text) else text


def scrolls(text: str) -> bool:
    """Whether the verdict of a report has left a terminal of 24 lines, once the text is printed there."""
    return text.count("\n", text.find("VERDICT")) >= _SCREEN


def answer_text(report: RunReport, *, width: int = 80, color: bool = False) -> str:
    """The verdict, its cause and the first next step."""
    console = TextConsole(width, color=color)
    print_headline(console, report.verdict, report.how_sure)
    for line in report.verdict.next[:1]:
        console.print(WrappedText(Text(line.splitlines()[0]), "Next: "))
        for more in line.splitlines()[1:]:
            console.print(Text(f"      {more}"), soft_wrap=True)
    return console.text()


def verdict_text(verdict: Verdict, *, width: int = 80, color: bool = False) -> str:
    """A verdict of no run of gpuwatch: what was found, why, and what to do."""
    console = TextConsole(width, color=color)
    print_headline(console, verdict, "" if verdict.kind is VerdictKind.UNKNOWN else verdict.how_sure)
    _reasons(console, verdict)
    return console.text()


def _titled(console: Console, section: ReportSection, lines: Iterable[RenderableType], style: str = "bold") -> None:
    """Print the lines under the section's title; print nothing if there are none."""
    found = list(lines)
    if found:
        console.print()
        console.print(Text(section.heading, style=style))
        for line in found:  # a command that is longer than a line is not cut in two
            console.print(line, soft_wrap=isinstance(line, Text))


def _verdict(console: Console, report: RunReport) -> None:
    print_headline(console, report.verdict, report.how_sure)
    _reasons(console, report.verdict)
    print_list(console, "Seen before", report.seen_before)
    console.print()


def _reasons(console: Console, verdict: Verdict) -> None:
    print_list(console, "Why", evidence_lines(verdict, console.width))
    print_list(console, "Capture", capture_lines(verdict.capture))
    print_list(console, "At the same time", concurrent_lines(verdict.concurrent))
    print_list(console, "Because of it", cascade_lines(verdict.cascade))
    print_list(console, "Next", verdict.next)


def print_headline(console: Console, verdict: Verdict, how_sure: str) -> None:
    """The kind, how sure it is ("": nothing), the statement and the cause."""
    mark = ": " if verdict.kind is VerdictKind.UNKNOWN else ", "
    title = Text(f"VERDICT  {verdict.kind}{mark if how_sure else ''}{how_sure}", style=f"bold {verdict.kind.tone}")
    console.print(dim_codes(title.append(f" {verdict.codes}")))
    for line in verdict.headlines:
        console.print(WrappedText(Text(line, style="bold")))


def print_list(console: Console, title: str, items: list[str]) -> None:
    """A title, and a line for each item. The further lines of an item are not wrapped."""
    if not items:
        return
    console.print(Text(title, style="bold"))
    for item in items:
        print_item(console, item)


def print_item(console: Console, item: str) -> None:
    """One item of a list."""
    first, *more = item.splitlines() or [""]
    console.print(list_item(first))
    for line in more:
        console.print(Text(f"    {line}"), soft_wrap=True)


def _ranks(console: Console, report: RunReport, rank: int | None) -> None:
    """The table, and the whole error of the rank that was asked for: its terminal may have shown one line of it."""
    print_ranks(console, report, _MAX_TABLE_ROWS)
    error = next((one.error for one in report.ranks if one.rank == rank and one.error is not None), None)
    if rank is not None and error is not None and error.get("traceback"):
        print_block(console, f"Traceback of rank {rank}", str(error["traceback"]).rstrip())


def print_ranks(console: Console, report: RunReport, most: int) -> None:
    """The table of the ranks, with at most that many rows and the processes that are no rank."""
    titles = "rank", "host", "device", "state", "step", "batch", "first non-finite value", "lost"
    table = Table(*(Column(title, overflow="fold") for title in titles), **PLAIN)
    rows = _ranks_of_table(report, most)
    for rank in [*rows, *report.processes]:
        table.add_row(
            rank.label,
            Text(rank.host),
            Text(rank.device or "-"),
            Text(state_text(rank, report.run.starter)),
            _number(rank.step),
            _number(rank.batch),
            Text(first_text(rank.first_anomaly)),
            str(rank.lost.total),
            style="bold" if rank.rank == report.named else None,
        )
    console.print(table)
    if len(rows) < len(report.ranks):
        states = Counter(state_text(rank, report.run.starter) for rank in report.ranks)
        text = ", ".join(f"{number} {state}" for state, number in states.most_common(_MAX_COLUMNS))
        console.print(Text(f"{len(rows)} of {len(report.ranks)} ranks ({text}); all are in report.json"))


def _ranks_of_table(report: RunReport, most: int) -> list[RankReport]:
    """All ranks of a small job; in a large one, those with a non-finite value, a different state, or frames."""
    if len(report.ranks) <= most:
        return report.ranks
    common = Counter(rank.state for rank in report.ranks).most_common(1)[0][0]
    named = [rank for rank in report.ranks if rank.rank == report.verdict.rank]
    met = [rank for rank in report.ranks if rank.first_anomaly is not None or rank.frames]
    differ = [rank for rank in report.ranks if rank.state != common or rank.error is not None]
    chosen = list({rank.rank: rank for rank in [*named, *met, *differ, *report.ranks[:1]]}.values())
    return sorted(chosen[:most], key=lambda rank: rank.rank)


def _number(number: int | None) -> str:
    return "-" if number is None or number < 0 else str(number)


def _fitting(found: SideBySide, width: int) -> int:
    """How many ranks have room beside the modules' names: a number that is cut says another one. At least two."""
    titles = (len(row.title) for row in found.rows)
    left = width - min(_MODULE_WIDTH, max(titles, default=0))
    count = 0
    for at, rank in enumerate(found.columns):
        cells = (len(row.cells[at].text) for row in found.rows)
        left -= _GAP + max(len(rank.name), len(f"batch {rank.frames[-1].batch}"), *cells)
        count += left >= 0
    return max(2, count)


def _side_by_side(console: Console, report: RunReport, shown: RankReport) -> None:
    found = side_by_side(report, shown, _MAX_COLUMNS, _MAX_MATRIX_ROWS)
    if found is not None:
        found = side_by_side(report, shown, _fitting(found, console.width), _MAX_MATRIX_ROWS)
    if found is None:
        return
    console.print()
    console.print(Text(f"abs max of the {found.what} in batch {found.batch}, rank by rank", style="bold"))
    table = Table(Column("module", overflow="fold"), **PLAIN)
    for rank in found.columns:
        own = rank.frames[-1].batch
        title = rank.name + (f"\nbatch {own}" if own != found.batch else "")
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(Text(row.title), *(Text(cell.text, "bold red" if cell.bad else "") for cell in row.cells))
    console.print(table)
    if found.left_out:
        more = f"{counted(found.left_out, 'more rank')}: in a wider terminal, or {report.run.report_command} --rank N"
        console.print(Text(more), soft_wrap=True)
    stored = [r for r in report.ranks if r.pages and not r.frames]
    if stored:
        more = f"{len(stored)} more ranks in the run's store: {report.run.report_command} --rank N"
        console.print(Text(more), soft_wrap=True)


def _frames(console: Console, report: RunReport, rank: RankReport | None) -> None:
    if rank is None:
        return
    _side_by_side(console, report, rank)
    print_block(console, frames_title(rank.rank, rank.frames), frames_text(rank.frames))


def frames_title(rank: int, frames: list[Frame]) -> str:
    """`Rank 3, batch 7: last 21 forward frames`"""
    phase = f"{frames[-1].phase} " if len({frame.phase for frame in frames}) == 1 else ""
    last = f"last {len(frames)} {phase}frames" if len(frames) != 1 else f"last {phase}frame"
    return f"{one_on(rank)}, batch {frames[-1].batch}: {last}"


def _traces(console: Console, report: RunReport, asked: int | None) -> None:
    for rank in report.ranks if asked is None else [r for r in report.ranks if r.rank == asked]:
        for page in rank.traces:
            title = f"Rank {rank.rank}, batch {page.batch} of {page.root}, traced: all frames"
            print_block(console, title, frames_text(page.frames))
        if rank.traces_left_out:
            left = f"{rank.traces_left_out} traced batches of rank {rank.rank} are only in the run's store"
            console.print(Text(f"{left}: {report.run.report_command} --rank {rank.rank}"), soft_wrap=True)


def print_block(console: Console, title: str, text: str) -> None:
    """Lines that are not wrapped, under a title."""
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Text(text), soft_wrap=True)
