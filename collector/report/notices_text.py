"""The notes of the text report beside the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from ...core.codes import Code, coded
from ...core.frames import format_number, module_text
from ...core.identity import rank_name
from ...core.text import shown_name
from ...core.torch_names import notes_on
from .model import RankReport, RunReport
from .sentence_parts import badness, coarse_share_text, counted, grouped, list_item, ranks_text

PLAIN: Any = {"box": None, "pad_edge": False, "header_style": "bold"}
"""A table without lines."""
_MAX_WARNINGS = 8
_MAX_INSIGHTS = 6
_MAX_HIDDEN = 4
_MAX_NOTABLE = 3
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
            yield coded(f"gpuwatch's own fault on {rank_name(rank.rank)}: {fault}", Code.OWN_FAULT)
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
    """Skipped steps, waived and absorbed values, batches skipped or not kept: a line each."""
    ranks = report.ranks
    notices = [
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
        scale = f", last scale {details['last_scale']:g}" if details.get("last_scale") is not None else ""
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
