"""What the text report has beside the verdict: notes, and the preflight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from ...core.codes import Code, coded
from ...core.events.own_limits import SELF_CHECK
from ...core.frames import format_number, module_text
from ...core.identity import rank_name
from ...core.preflight import PreflightFinding
from ...core.text import numbers_text, shown_name
from ...core.torch_names import notes_on
from .last_minute import last_minute
from .model import RankReport, RunReport
from .preflight_table import GRADES, BandwidthSize, NodeRow, PreflightReport, StageCell
from .sentence_parts import badness, bytes_text, coarse_share_text, counted, grouped, list_item, ranks_text

PLAIN: Any = {"box": None, "pad_edge": False, "header_style": "bold"}
"""A table without lines."""
_MAX_WARNINGS = 8
_MAX_INSIGHTS = 6
_MAX_HIDDEN = 4
_MAX_NOTABLE = 3
_MOST_ALERTS = 4
_CLOCK_OFF_S = 1.0
_TURNED_AWAY = {
    "refused": "clients with another key or of another run",
    "from_viewers": "messages of viewers",
    "replayed": "repeated hellos",
    "disbelieved": "messages about another node's ranks",
    "malformed": "messages that could not be read",
}


def notes(report: RunReport) -> Iterator[RenderableType]:
    """Trouble of gpuwatch's own, then expected and waived values, and skipped batches."""
    yield from (list_item(line, "yellow") for line in trouble_lines(report))
    yield from (list_item(line) for line in notice_lines(report))


def trouble_lines(report: RunReport) -> Iterator[str]:
    """Errors of gpuwatch itself, data that did not reach this report, and clocks that are too far apart to compare."""
    for node in report.nodes:
        if node.clock_offset_ns is not None and abs(node.clock_offset_ns) > _CLOCK_OFF_S * 1e9:
            off = -node.clock_offset_ns / 1e9
            text = f"the clock of {node.host} is {off:+.1f} s off the collector's: allow for it when you compare logs"
            yield coded(text, Code.CLOCK_OFF)
    yield from (coded(note, Code.TORCH_UNSEEN) for note in notes_on(report.run.versions.get("torch", "")))
    for rank in report.everyone:
        for fault in rank.faults:
            code = Code.READER_OFF if fault.startswith(f"{SELF_CHECK}: ") else Code.OWN_FAULT
            yield coded(f"gpuwatch's own fault on {rank_name(rank.rank)}: {fault}", code)
    if untold := report.collector.get("metrics_faults", 0):
        text = f"gpuwatch's own fault in the collector: the metrics could not be computed {untold} times (see its log)"
        yield coded(text, Code.OWN_FAULT)
    if unwritten := report.collector.get("unwritten", 0):
        text = f"{unwritten} messages could not be written to the run store (is the disk full?)"
        yield coded(text, Code.STORE_UNWRITTEN)
    found = [f"{report.collector[key]} {what}" for key, what in _TURNED_AWAY.items() if report.collector.get(key)]
    if found:
        yield coded(f"the collector rejected: {', '.join(found)}", Code.CLIENTS_REJECTED)


def notice_lines(report: RunReport) -> list[str]:
    """Nodes read from spools, skipped steps, waived and absorbed values, batches skipped or not kept: a line each."""
    ranks = report.ranks
    spools = [
        f"what {node.host} recorded had not reached the collector, and was read from {node.spool}"
        for node in report.nodes
        if node.spool
    ]
    notices = [
        (Code.COLLECTOR_ENDED, spools),
        (Code.SCALER_SKIPS, _scaler(ranks)),
        (Code.VALUES_WAIVED, _waived(ranks)),
        (Code.VALUES_ABSORBED, _absorbed(ranks)),
        (Code.BATCHES_SKIPPED, _skipped(ranks)),
        (Code.TRACES_THINNED, _thinned(report.everyone)),
        (Code.GROUPS_NOT_SHOWN, _groups(ranks)),
    ]
    return [coded(line, code) for code, lines in notices for line in lines]


def node_notes(report: RunReport) -> Iterator[RenderableType]:
    """Unusual figures of the nodes around the event."""
    telemetry = report.telemetry
    if telemetry is None:
        return
    first = list({notable.what: notable for notable in reversed(telemetry.notable)}.values())[::-1]
    for notable in first[:_MAX_NOTABLE]:
        alike = f"; the same on {counted(notable.alike, 'other node')}" if notable.alike else ""
        yield list_item(coded(f"{notable.text}{alike}", notable.code))
    if len(first) > _MAX_NOTABLE:
        yield Text(f"{len(first) - _MAX_NOTABLE} more in report.json")
    if telemetry.trouble:
        yield Text(telemetry.trouble, style="yellow")


def last_minute_table(report: RunReport) -> Iterator[Table | Text]:
    """The memory of the lost rank and of its node in the minute before."""
    found = last_minute(report)
    if found is None:
        return
    yield Text(found.title)
    times = (Column(time, justify="right", no_wrap=True) for time in found.times)
    table = Table(Column("", overflow="fold"), *times, "", **PLAIN)
    for row in found.rows:
        table.add_row(row.title, *row.values, row.limit)
    yield table


def step_notes(report: RunReport) -> Iterator[RenderableType]:
    """The ranks that the others wait for."""
    steps = report.steps
    if steps is None:
        return
    for slow in steps.stragglers:
        yield list_item(coded(slow.text, slow.code))
        yield from (list_item(line, mark="  ") for line in slow.beside)
    if steps.trouble:
        yield Text(steps.trouble, style="yellow")


def insight_notes(report: RunReport, *, warnings: bool) -> Iterator[RenderableType]:
    """The insights. `warnings`: the rows behind them follow."""
    for insight in report.insights[:_MAX_INSIGHTS]:
        yield list_item(coded(f"{insight.text}. {insight.next}".rstrip(), insight.code))
    left_out = len(report.insights) - _MAX_INSIGHTS
    rows = sum(rank.warned for rank in report.ranks)
    more = [f"{left_out} more in report.json"] if left_out > 0 else []
    more += [f"{counted(rows, 'row')} in all: {report.run.report_command} --warnings"] if rows and not warnings else []
    if more:
        yield Text("; ".join(more))


def warned_rows_table(report: RunReport) -> Iterator[Table | Text]:
    """The rows near overflow or in underflow, the worst first."""
    found = sorted(((rank.rank, warning) for rank in report.ranks for warning in rank.warnings), key=_badness)
    titles = "rank", "kind", "module", "role", "batch", "dtype", "abs max", "left", "zeros", "subnormal"
    table = Table(*(Column(title, overflow="fold") for title in titles), **PLAIN)
    for number, warning in found[:_MAX_WARNINGS]:
        headroom = warning.get("headroom")
        cells = [
            *(str(number), warning["kind"], f"{warning['module'] or '(root)'} {warning['class']}", warning["role"]),
            *(str(warning["batch"]), warning["dtype"], format_number(warning.get("abs_max")).strip()),
            f"2^{headroom:.1f}" if headroom is not None else "-",
            *(coarse_share_text(share) if (share := warning.get(key)) else "-" for key in ("zeros", "subnormals")),
        ]
        table.add_row(*map(Text, cells))
    yield table
    left_out = len(found) - min(len(found), _MAX_WARNINGS)
    rows = sum(rank.warned for rank in report.ranks)
    more = [f"{left_out} more from other places in report.json"] if left_out else []
    more += [f"{rows} such rows in all batches"] if rows > len(found) else []
    if more:
        yield Text("; ".join(more))


def _badness(entry: tuple[int, dict[str, Any]]) -> tuple[Any, ...]:
    number, row = entry
    bad = badness(row["kind"], row.get("headroom"), row.get("subnormals"), row.get("zeros"))
    return *bad, number, row["batch"], row["module"], row["role"]


def _scaler(ranks: list[RankReport]) -> Iterator[str]:
    by_count = grouped((rank for rank in ranks if rank.scaler is not None), lambda rank: rank.scaler_skips)
    for count, alike in sorted(by_count.items()):
        details, where = alike[0].scaler or {}, ""
        if details.get("role") is not None:
            where = f", first for {details['value']} in {details['role']} of {details['module'] or 'the root'}"
        scale = f", the last at scale {details['last_scale']:g}" if details.get("last_scale") is not None else ""
        who = ranks_text([rank.rank for rank in alike])
        yield f"GradScaler skipped {counted(count, 'step')} on {who} (expected{where}{scale})"


def _waived(ranks: list[RankReport]) -> Iterator[str]:
    waived = ((rank.rank, row) for rank in ranks for row in rank.hidden)
    by_pattern = grouped(waived, lambda entry: str(entry[1]["pattern"]))
    total = sum(rank.ignored for rank in ranks)
    for pattern, found in sorted(by_pattern.items())[:_MAX_HIDDEN]:
        number, first = min(found, key=lambda entry: (entry[1]["batch"], entry[0]))
        count = f"{counted(total, 'row')}, " if len(by_pattern) == 1 else ""
        where = f"{first['role']} of {first['module'] or 'the root'}, rank {number}, batch {first['batch']}"
        yield f"waived by --ignore '{pattern}': {count}first {first['value']} in {where}"
    if total and len(by_pattern) != 1:
        yield f"waived by --ignore: {total} rows in all"


def _absorbed(ranks: list[RankReport]) -> Iterator[str]:
    """`absorbed: nan in output of attn.softmax (Softmax), made of a mask of -inf and taken away in attn, ...`"""
    rows = (row for rank in ranks for row in rank.absorbed_first)
    for first, *_ in list(grouped(rows, lambda row: (row["module"], row["role"], row["by"])).values())[:_MAX_HIDDEN]:
        where = f"{first['role']} of {module_text(first['module'], first['class'])}"
        yield f"absorbed: {first['value']} in {where}, {_led_nowhere(first)}, first in batch {first['batch']}"
    total = sum(rank.absorbed for rank in ranks)
    if total:
        yield f"absorbed: {counted(total, 'such tensor')} in all"


def _led_nowhere(told: dict[str, Any]) -> str:
    if told["why"] == "no gradient":
        return "which reached no output and got no gradient"
    if told["why"] == "not trained":
        return "which no optimizer holds and no backward reached"
    by = f"`{shown_name(told['by'])}`" if told["by"] else "the root module"
    made = "made from a mask of -inf and " if not told["why"] else ""
    return f"{made}removed in {by}"


def _skipped(ranks: list[RankReport]) -> Iterator[str]:
    skipped = max((rank.batches_skipped for rank in ranks), default=0)
    batches = max(((rank.batch or 0) + 1 for rank in ranks), default=0)
    if 0 < skipped < batches:
        yield f"only one batch in {round(batches / (batches - skipped))} was inspected; {skipped} were skipped"
    elif skipped:
        yield f"{skipped} batches were skipped"
    chosen = [(choice["cost"], rank.name, choice) for rank in ranks for choice in rank.watch_choices]
    costs = [each for each in chosen if not each[2]["alert"]]
    if costs:
        _, name, choice = max(costs, key=lambda each: each[0])
        many = f"; of {counted(len(costs), 'rank')} this is the one where it cost most" if len(costs) > 1 else ""
        yield f"--every auto, {name}: {choice['text']}{many}"
    for _, name, choice in [each for each in chosen if each[2]["alert"]][:_MOST_ALERTS]:
        yield f"--every auto, {name}: {choice['text']}"


def _thinned(ranks: list[RankReport]) -> Iterator[str]:
    pages = [rank.traces_thinned for rank in ranks if rank.traces_thinned > 0]
    if pages:
        yield (
            f"{sum(pages)} traced batches of {counted(len(pages), 'rank')} were recorded but not kept: a job's store "
            "holds 1 GiB of them. Those around an overflow and the last of each rank are kept; name fewer in "
            "--trace-batches"
        )


def _groups(ranks: list[RankReport]) -> Iterator[str]:
    without = [rank for rank in ranks if rank.groups_not_shown]
    if without:
        groups = counted(max(rank.groups_not_shown for rank in without), "process group")
        who = ranks_text([rank.rank for rank in without])
        yield f"{groups} of {who} did not fit in the table of groups: the report shows less of a hang in them"


# The preflight: a row per node and a column per stage, then the findings beside the verdict.

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
