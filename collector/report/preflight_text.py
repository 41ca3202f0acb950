"""The preflight on a terminal: a row per node and a column per stage, then the findings beside the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from ...core.codes import coded
from ...core.preflight import PreflightFinding
from ...core.text import numbers_text
from .model import GRADES, BandwidthSize, NodeRow, PreflightReport, RunReport, StageCell
from .notices_text import PLAIN
from .sentence_parts import counted, grouped, list_item

_STYLES = {"ok": "green", "victim": "yellow", "unknown": "yellow", "warn": "yellow", "fail": "bold red"}
_MOST_ROWS = 8
"""Up to this many nodes get a row each. With more nodes, those without trouble share one."""
_MOST_ALIKE = 4
"""Up to this many nodes with the same trouble get a row each."""
_MAX_FINDINGS = 16
_MAX_HOSTS = 3


def print_stages(console: Console, preflight: PreflightReport) -> None:
    """Print how each node passed each stage, with the time of its slowest rank; in two tables where one is too wide."""
    if not preflight.stages:
        return
    console.print(Text("Preflight: each stage with the seconds of its slowest rank", style="bold"))
    tables = [_stage_table(preflight, slice(None))]
    if Measurement.get(console, console.options.update(max_width=1000), tables[0]).maximum > console.width:
        half = (len(preflight.stages) + 1) // 2
        tables = [_stage_table(preflight, part) for part in (slice(half), slice(half, None))]
    console.print(*tables, "", sep="")


def _stage_table(preflight: PreflightReport, part: slice) -> Table:
    own = (Column(title, overflow="fold") for title in ("node", "ranks"))
    stages = (Column(column.stage.replace(" ", "\n"), no_wrap=True) for column in preflight.stages[part])
    table = Table(*own, *stages, collapse_padding=True, **PLAIN)
    for hosts, ranks, cells in stage_rows(preflight):
        table.add_row(Text(hosts), numbers_text(ranks) if ranks else "-", *map(_cell, cells[part]))
    return table


def stage_rows(preflight: PreflightReport) -> list[tuple[str, list[int], list[StageCell | None]]]:
    """(hosts, ranks, the slowest cell of each stage or None), a row for each node or for several that are alike."""
    rows, stages = [], [column.stage for column in preflight.stages]
    for nodes in _folded(preflight.nodes):
        by_stage = ([node.stages[stage] for node in nodes if stage in node.stages] for stage in stages)
        slowest = [max(cells, key=lambda cell: cell.seconds, default=None) for cells in by_stage]
        rows.append((_hosts_text(nodes), [rank for node in nodes for rank in node.ranks], slowest))
    return rows


def _folded(nodes: list[NodeRow]) -> list[list[NodeRow]]:
    """The nodes that share a row of the table: those in trouble first."""
    if len(nodes) <= _MOST_ROWS:
        return [[node] for node in nodes]
    rows: list[list[NodeRow]] = []
    alike = grouped(nodes, lambda node: tuple((stage, cell.grade) for stage, cell in node.stages.items()))
    for group in alike.values():
        together = group[0].grade == "ok" or len(group) > _MOST_ALIKE
        rows += [group] if together else [[node] for node in group]
    return sorted(rows, key=lambda row: (-GRADES.index(row[0].grade or "ok"), row[0].ranks))


def _hosts_text(rows: list[NodeRow]) -> str:
    """The host of one node; for several nodes, their number, and the first hosts unless all is well."""
    if len(rows) == 1:
        return rows[0].host
    if rows[0].grade == "ok":
        return f"{len(rows)} nodes"
    names = ", ".join(row.host for row in rows[:_MAX_HOSTS])
    return f"{len(rows)} nodes: {names}{', ...' if len(rows) > _MAX_HOSTS else ''}"


def _cell(cell: StageCell | None) -> Text:
    if cell is None:
        return Text("-")
    seconds = f" {cell.seconds:.0f}" if cell.seconds >= 99.5 else f" {cell.seconds:.1f}" if cell.ranks else ""
    return Text.assemble((cell.grade, _STYLES[cell.grade]), seconds)


def print_findings(console: Console, report: RunReport) -> None:
    """Print the findings that are not in the verdict, and the bandwidth."""
    preflight = report.preflight
    told_already = " ".join([report.verdict.statement, *report.verdict.evidence])
    left = [finding for finding in preflight.findings if finding.sentence not in told_already]
    _list(console, "Differences between ranks", [f for f in left if f.stage == "consistency"])
    _bandwidth(console, preflight.bandwidth)
    _list(console, "Also found by the preflight", [f for f in left if f.stage != "consistency"])


def _list(console: Console, title: str, findings: list[PreflightFinding]) -> None:
    if not findings:
        return
    console.print(Text(title, style="bold"))
    for finding in findings[:_MAX_FINDINGS]:
        place = "" if finding.stage == "consistency" else f"{finding.stage}, "
        text = f"{finding.sentence}.{f' {finding.next}' if finding.next else ''}"
        grade = (f"{place}{finding.grade}", _STYLES[finding.grade])
        console.print(list_item(Text.assemble(grade, f": {coded(text, finding.code)}")))
    if len(findings) > _MAX_FINDINGS:
        console.print(list_item(f"and {len(findings) - _MAX_FINDINGS} more in report.json"))
    console.print()


def _bandwidth(console: Console, sizes: list[BandwidthSize]) -> None:
    if not sizes:
        return
    title = f"Bandwidth of all_reduce over {counted(sizes[-1].ranks, 'rank')}, as its slowest rank saw it"
    console.print(Text(title, style="bold"))
    titles = "size", "time us", "algbw GB/s", "busbw GB/s", "best busbw"
    table = Table(*(Column(title, justify="right") for title in titles), "slowest", **PLAIN)
    for size in sizes:
        bandwidths = (f"{gbs:.3g}" for gbs in (size.algbw_gbs, size.busbw_gbs, size.best_busbw_gbs))
        slowest = Text(f"rank {size.rank} on {size.host}")
        table.add_row(bytes_text(size.size_bytes), f"{size.time_us:.0f}", *bandwidths, slowest)
    console.print(table)
    console.print()


def bytes_text(size: int) -> str:
    """`16 MiB`; in bytes if the size is no whole number of a unit.

    >>> bytes_text(16 << 20), bytes_text(1000)
    ('16 MiB', '1000 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"
