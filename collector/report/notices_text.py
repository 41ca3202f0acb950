"""What the text report says beside the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.frames import format_number, module_text
from ...core.identity import rank_name
from ...core.text import shown_name
from ...core.torch_names import notes_on
from ...core.verdicts import ReportSection
from .model import RankReport, RunReport
from .sentence_parts import ranks_text

_MAX_WARNINGS = 8
_MAX_INSIGHTS = 6
_MAX_HIDDEN = 4
_MAX_NOTABLE = 3
_CLOCK_OFF_S = 1.0
_TURNED_AWAY = {
    "refused": "clients with another key or of another run",
    "from_viewers": "messages of viewers",
    "replayed": "hellos that were heard before",
    "disbelieved": "messages about another node's ranks",
    "malformed": "messages that could not be read",
}


def print_title(console: Console, section: ReportSection, style: str = "bold") -> None:
    """A section's title, on a line of its own."""
    console.print()
    console.print(Text(section.heading, style=style))


def print_notes(console: Console, report: RunReport) -> None:
    """Trouble of gpuwatch's own, then expected and waived values, skipped batches and the cost of watching."""
    print_title(console, ReportSection.NOTES)
    for line in trouble_lines(report):
        console.print(Text(f"  - {line}", style="yellow"))
    for line in notice_lines(report):
        console.print(Text(f"  - {line}"))


def trouble_lines(report: RunReport) -> Iterator[str]:
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


def notice_lines(report: RunReport) -> list[str]:
    """Skipped steps, waived and absorbed values, batches skipped or not kept, the cost of watching: a line each."""
    ranks = report.ranks
    thinned = _thinned([*ranks, *report.processes])
    return [
        *_scaler(ranks),
        *_waived(ranks),
        *_absorbed(ranks),
        *_skipped(ranks),
        *thinned,
        *_groups(ranks),
        *_cost(ranks),
    ]


def print_nodes(console: Console, report: RunReport) -> None:
    """What stands out in the figures of the nodes around the event."""
    telemetry = report.telemetry
    if telemetry is None or not (telemetry.notable or telemetry.trouble):
        return
    print_title(console, ReportSection.NODES)
    first = list({notable.what: notable for notable in reversed(telemetry.notable)}.values())[::-1]
    for notable in first[:_MAX_NOTABLE]:
        alike = f"; so on {notable.alike} other node{'s' if notable.alike > 1 else ''}" if notable.alike else ""
        console.print(Text(f"  - {notable.text}{alike}"))
    if len(first) > _MAX_NOTABLE:
        console.print(Text(f"{len(first) - _MAX_NOTABLE} more in report.json"))
    if telemetry.trouble:
        console.print(Text(telemetry.trouble, style="yellow"))


def print_steps(console: Console, report: RunReport) -> None:
    """The ranks that the others wait for."""
    steps = report.steps
    if steps is None or not (steps.stragglers or steps.trouble):
        return
    print_title(console, ReportSection.STEPS, "bold red" if any(slow.loud for slow in steps.stragglers) else "bold")
    for slow in steps.stragglers:
        console.print(Text(f"  - {slow.text}"))
        for line in slow.beside:
            console.print(Text(f"    {line}"))
    if steps.trouble:
        console.print(Text(steps.trouble, style="yellow"))


def print_insights(console: Console, report: RunReport, *, warnings: bool) -> None:
    """What values near trouble come to. `warnings`: their rows follow."""
    print_title(console, ReportSection.INSIGHTS)
    for insight in report.insights[:_MAX_INSIGHTS]:
        console.print(Text(f"  - {insight.text}. {insight.next}"))
    left_out = len(report.insights) - _MAX_INSIGHTS
    rows = sum(rank.warned for rank in report.ranks)
    more = [f"{left_out} more in report.json"] if left_out > 0 else []
    more += (
        [f"{rows} row{'s' if rows != 1 else ''} in all: gpuwatch report --warnings"] if rows and not warnings else []
    )
    if more:
        console.print(Text("; ".join(more)))


def print_warnings(console: Console, report: RunReport) -> None:
    """The rows near overflow or in underflow, the worst first."""
    found = sorted(((rank.rank, warning) for rank in report.ranks for warning in rank.warnings), key=_badness)
    print_title(console, ReportSection.WARNINGS)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rank", "kind", "module", "role", "batch", "dtype", "abs max", "left", "zeros", "subnormal"):
        table.add_column(title, overflow="fold")
    for number, warning in found[:_MAX_WARNINGS]:
        headroom = warning.get("headroom")
        table.add_row(
            str(number),
            Text(warning["kind"]),
            Text(f"{warning['module'] or '(root)'} {warning['class']}"),
            Text(warning["role"]),
            str(warning["batch"]),
            Text(warning["dtype"]),
            format_number(warning.get("abs_max")).strip(),
            f"2^{headroom:.1f}" if headroom is not None else "-",
            _share(warning.get("zeros")),
            _share(warning.get("subnormals")),
        )
    console.print(table)
    left_out = len(found) - min(len(found), _MAX_WARNINGS)
    rows = sum(rank.warned for rank in report.ranks)
    more = [f"{left_out} more of other places in report.json"] if left_out else []
    more += [f"{rows} such rows in all batches"] if rows > len(found) else []
    if more:
        console.print(Text("; ".join(more)))


def _badness(entry: tuple[int, dict[str, Any]]) -> tuple[Any, ...]:
    number, warning = entry
    near = warning["kind"] == "near overflow"
    lost = max(warning.get("subnormals") or 0.0, warning.get("zeros") or 0.0)
    headroom = warning.get("headroom")
    left = headroom if headroom is not None else 1e9
    return not near, left if near else -lost, number, warning["batch"], warning["module"], warning["role"]


def _share(share: float | None) -> str:
    return "-" if not share else share_text(share)


def _scaler(ranks: list[RankReport]) -> list[str]:
    by_count: dict[int, list[RankReport]] = {}
    for rank in ranks:
        if rank.scaler is not None:
            by_count.setdefault(rank.scaler_skips, []).append(rank)
    lines = []
    for count, alike in sorted(by_count.items()):
        details = alike[0].scaler or {}
        where = ""
        if details.get("role") is not None:
            where = f", first for {details['value']} in {details['role']} of {details['module'] or 'the root'}"
        scale = f", scale {details['last_scale']:g} at the last" if details.get("last_scale") is not None else ""
        lines.append(
            f"GradScaler skipped {count} step{'s' if count != 1 else ''} on {ranks_text([r.rank for r in alike])} "
            f"(expected{where}{scale})"
        )
    return lines


def _waived(ranks: list[RankReport]) -> list[str]:
    by_pattern: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for rank in ranks:
        for waived in rank.hidden:
            by_pattern.setdefault(waived["pattern"], []).append((rank.rank, waived))
    total = sum(rank.ignored for rank in ranks)
    lines = []
    for pattern, found in sorted(by_pattern.items())[:_MAX_HIDDEN]:
        number, first = min(found, key=lambda entry: (entry[1]["batch"], entry[0]))
        count = f"{total} row{'s' if total != 1 else ''}, " if len(by_pattern) == 1 else ""
        lines.append(
            f"waived by --ignore '{pattern}': {count}first {first['value']} in {first['role']} of "
            f"{first['module'] or 'the root'}, rank {number}, batch {first['batch']}"
        )
    if total and len(by_pattern) != 1:
        lines.append(f"waived by --ignore: {total} rows in all")
    return lines


def _absorbed(ranks: list[RankReport]) -> list[str]:
    """`absorbed: nan in output of attn.softmax (Softmax), made of a mask of -inf and taken away in attn, ...`"""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for rank in ranks:
        for first in rank.absorbed_first:
            found.setdefault((first["module"], first["role"], first["by"]), first)
    total = sum(rank.absorbed for rank in ranks)
    lines = [
        f"absorbed: {first['value']} in {first['role']} of {module_text(first['module'], first['class'])}, "
        f"{_led_nowhere(first)}, first in batch {first['batch']}"
        for first in list(found.values())[:_MAX_HIDDEN]
    ]
    if total:
        lines.append(f"absorbed: {total} such tensor{'s' if total != 1 else ''} in all")
    return lines


def _led_nowhere(told: dict[str, Any]) -> str:
    if told["why"] == "no gradient":
        return "which no output shows and which gets no gradient"
    if told["why"] == "not trained":
        return "which no optimizer holds and no backward reached"
    by = f"`{shown_name(told['by'])}`" if told["by"] else "the root module"
    made = "made of a mask of -inf and " if not told["why"] else ""
    return f"{made}taken away in {by}"


def _skipped(ranks: list[RankReport]) -> list[str]:
    skipped = max((rank.batches_skipped for rank in ranks), default=0)
    if not skipped:
        return []
    batches = max(((rank.batch or 0) + 1 for rank in ranks), default=0)
    if skipped < batches:
        return [f"only one batch in {round(batches / (batches - skipped))} was looked at; {skipped} were skipped"]
    return [f"{skipped} batches were skipped"]


def _thinned(ranks: list[RankReport]) -> list[str]:
    pages = sum(rank.traces_thinned for rank in ranks)
    if not pages:
        return []
    of = sum(rank.traces_thinned > 0 for rank in ranks)
    return [
        f"{pages} traced batches of {of} rank{'s' if of != 1 else ''} were recorded and not kept: a job's store takes "
        "1 GiB of them. Those around an overflow and the last of each rank are there; name fewer in --trace-batches"
    ]


def _groups(ranks: list[RankReport]) -> list[str]:
    without = [rank for rank in ranks if rank.groups_not_shown]
    if not without:
        return []
    most = max(rank.groups_not_shown for rank in without)
    who = ranks_text([rank.rank for rank in without])
    text = f"{most} process group{'s' if most != 1 else ''} of {who} found no room in the table of groups"
    return [f"{text}: the report says less of a hang in one of them"]


def _cost(ranks: list[RankReport]) -> list[str]:
    measured = [rank for rank in ranks if rank.cost is not None and rank.cost.get("ratio") is not None]
    if not measured:
        return []
    worst = max(measured, key=lambda rank: rank.cost["ratio"] if rank.cost is not None else 0.0)
    cost = worst.cost or {}
    return [
        f"Watching cost {cost['ratio']:.2f}x (median of {cost['watched_batches']} watched batches against "
        f"{cost['plain_batches']} plain ones, rank {worst.rank}, the slowest)"
    ]


def share_text(share: float) -> str:
    """`12%`. A share above zero is never written as 0%.

    >>> share_text(0.0004)
    '<1%'
    """
    return f"{share:.0%}" if share >= 0.005 else "<1%"
