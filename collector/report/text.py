"""The report for a terminal: the verdict, the table of all ranks, then the numbers."""

from __future__ import annotations

import io
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.frames import Frame, format_number, module_text
from ...core.text.ranks_text import ranks_text
from ..decide.verdict_model import Cascade, Concurrent
from .frames_text import frames_text
from .model import FirstAnomaly, RankReport, Report
from .notices_text import print_notices
from .preflight_text import print_findings, print_stages
from .stacks import stacks_text

_COLORS = {"clean": "bold green", "interrupted": "bold yellow", "unknown": "bold yellow"}
_MAX_COLUMNS = 8
_MAX_TABLE_ROWS = 64
_MAX_MATRIX_ROWS = 12
_MAX_CASCADE = 8
_MAX_ATTEMPTS = 8
_CLOCK_OFF_S = 1.0


def render_text(report: Report, *, width: int = 110, color: bool = False, rank: int | None = None) -> str:
    """The whole report as text, `width` characters wide; `rank` chooses whose frames are shown."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, color_system="standard" if color else None, highlight=False
    )
    _head(console, report)
    preflight_first = report.run.check_only or report.verdict.kind == "preflight"
    if preflight_first:
        print_stages(console, report.preflight)
    _verdict(console, report)
    if preflight_first:
        print_findings(console, report.preflight, [report.verdict.statement, *report.verdict.evidence])
        _clocks(console, report)
        _faults(console, report)
        _turned_away(console, report)
        return _text_of(out)
    _ranks(console, report)
    _stacks(console, report)
    _clocks(console, report)
    _faults(console, report)
    _turned_away(console, report)
    print_findings(console, report.preflight)
    print_notices(console, report)
    shown = _rank_to_show(report, rank)
    if shown is not None and (report.verdict.kind != "clean" or rank is not None):
        _side_by_side(console, report, shown)
        _frames(console, shown)
    for traced in report.ranks if rank is None else [r for r in report.ranks if r.rank == rank]:
        _traces(console, traced)
    return _text_of(out)


def _text_of(out: io.StringIO) -> str:
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip("\n")


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
        _list(console, "At the same time", _concurrent(verdict.concurrent))
    if verdict.cascade:
        _list(console, "Because of it", _cascade(verdict.cascade))
    _list(console, "Next", verdict.next)
    _list(console, "Other attempts of this job, which torchrun restarted", _attempts(report))
    _list(
        console,
        "Before this job was requeued",
        [f"{life.run}{f', {life.kind}' if life.kind else ''}: {life.statement}" for life in report.run.earlier],
    )
    console.print()


def _concurrent(concurrent: list[Concurrent]) -> list[str]:
    """Ranks that met the same share a line, because there can be hundreds."""
    alike: dict[str, list[Concurrent]] = {}
    for other in concurrent:
        found = other.text or f"{other.value} in {other.role} of {module_text(other.module, other.cls)}"
        alike.setdefault(found, []).append(other)
    return [
        f"rank {others[0].rank} on {others[0].host}: {found}"
        if len(others) == 1
        else f"{ranks_text([other.rank for other in others])}: {found}"
        for found, others in alike.items()
    ]


def _attempts(report: Report) -> list[str]:
    """The last ones; there can be hundreds."""
    left = max(0, len(report.attempts) - _MAX_ATTEMPTS)
    lines = [f"attempt {other.attempt}: {other.statement}" for other in report.attempts[left:]]
    return [*([f"{left} more in report.json"] if left else []), *lines]


def _cascade(cascade: list[Cascade]) -> list[str]:
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
    if not report.ranks:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rank", "host", "device", "state", "step", "batch", "first non-finite value", "lost"):
        table.add_column(title, overflow="fold")
    rows = _ranks_of_table(report)
    for rank in rows:
        lost = rank.lost.pages + rank.lost.messages + rank.lost.frames + rank.lost.rows
        exit_ = f" ({rank.exit})" if rank.exit not in (0, None) else ""
        table.add_row(
            str(rank.rank),
            Text(rank.host),
            Text(rank.device or "-"),
            Text(rank.state + exit_),
            _number(rank.step),
            _number(rank.batch),
            Text(_first(rank.first_anomaly)),
            str(lost),
            style="bold" if rank.rank == report.verdict.rank else None,
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


def _first(first: FirstAnomaly | None) -> str:
    """`batch 7: nan, fc1 output`: the row in which the first non-finite value was seen."""
    if first is None:
        return "-"
    at = first.seen_in
    module, cls, role = (at.module, at.cls, at.role) if at is not None else (first.module, first.cls, first.role)
    return f"batch {first.batch}: {first.value}, {module or f'(root) {cls}'} {role}"


def _clocks(console: Console, report: Report) -> None:
    """Warn of clocks that are too far apart to compare the logs of two hosts."""
    for node in report.nodes:
        if node.clock_offset_ns is not None and abs(node.clock_offset_ns) > _CLOCK_OFF_S * 1e9:
            off = -node.clock_offset_ns / 1e9
            console.print(
                Text(f"the clock of {node.host} is {off:+.1f} s off the collector's: mind it in logs", "yellow")
            )


def _faults(console: Console, report: Report) -> None:
    """Print the errors of gpuwatch itself."""
    for rank in report.ranks:
        for fault in rank.faults:
            console.print(Text(f"gpuwatch's own fault on rank {rank.rank}: {fault}", style="yellow"))
    unwritten = report.collector.get("unwritten", 0)
    if unwritten:
        console.print(
            Text(f"{unwritten} messages could not be written to the run store (is the disk full?)", style="yellow")
        )


_TURNED_AWAY = {
    "refused": "clients with another key or of another run",
    "from_viewers": "messages of viewers",
    "replayed": "hellos that were heard before",
    "disbelieved": "messages about another node's ranks",
    "malformed": "messages that could not be read",
}


def _turned_away(console: Console, report: Report) -> None:
    """What reached the collector and is not in this report."""
    found = [f"{report.collector[key]} {what}" for key, what in _TURNED_AWAY.items() if report.collector.get(key)]
    if found:
        console.print(Text(f"the collector turned away: {', '.join(found)}", style="yellow"))


def _number(number: int | None) -> str:
    return "-" if number is None or number < 0 else str(number)


def _rank_to_show(report: Report, rank: int | None) -> RankReport | None:
    wanted = rank if rank is not None else report.verdict.rank
    if wanted is None:
        return next((r for r in report.ranks if r.frames), None)
    return next((r for r in report.ranks if r.rank == wanted and r.frames), None)


def _side_by_side(console: Console, report: Report, shown: RankReport) -> None:
    """abs max of what each module returned, a column per rank: the same point of the training on all of them."""
    batch = shown.frames[-1].batch
    others = [r for r in report.ranks if r.frames and r.frames_comparable and r is not shown]
    if not shown.frames_comparable:
        return
    columns = [shown, *others[: _MAX_COLUMNS - 1]]
    if len(columns) < 2:
        return
    console.print()
    what = "outputs" if all(frame.phase == "forward" for frame in shown.frames) else "outputs and gradients"
    console.print(Text(f"abs max of the {what} in batch {batch}, rank by rank", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module", overflow="fold")
    for rank in columns:
        own = rank.frames[-1].batch
        table.add_column(f"rank {rank.rank}" + (f"\nbatch {own}" if own != batch else ""), justify="right")
    by_rank = [{_key(frame): frame for frame in rank.frames} for rank in columns]
    for frame in shown.frames[-_MAX_MATRIX_ROWS:]:
        title = f"{frame.module or '(root)'} {frame.cls}"
        if frame.phase != "forward":
            title += f" {frame.rows[0].role if len(frame.rows) == 1 else f'({frame.phase})'}"
        table.add_row(Text(title), *(_abs_max(frames.get(_key(frame))) for frames in by_rank))
    console.print(table)
    left_out = len(others) - (len(columns) - 1)
    if left_out:
        console.print(Text(f"{left_out} more ranks in report.json"))
    stored = [r for r in report.ranks if r.pages and not r.frames]
    if stored:
        console.print(Text(f"{len(stored)} more ranks in the run's store: gpuwatch report --rank N"))


def _key(frame: Frame) -> tuple[str, str, str | int]:
    """Identifies the same frame on two ranks. Gradients come in another order on each rank."""
    return frame.module, frame.phase, frame.index if frame.phase == "forward" or not frame.rows else frame.rows[0].role


def _abs_max(frame: Frame | None) -> Text:
    if frame is None:
        return Text("-")
    rows = frame.outputs if frame.phase in ("forward", "recompute") else frame.rows
    rows = [row for row in rows if row.kind == "measured"]
    if not rows:
        return Text("-")
    for name, bad in (("nan", any(r.nan for r in rows)), ("inf", any(r.posinf or r.neginf for r in rows))):
        if bad:
            return Text(name, style="bold red")
    return Text(format_number(max(row.abs_max or 0.0 for row in rows)))


def _frames(console: Console, rank: RankReport) -> None:
    frames = rank.frames
    console.print()
    phases = {frame.phase for frame in frames}
    phase = f"{frames[-1].phase} " if len(phases) == 1 else ""
    console.print(Text(f"Rank {rank.rank}, batch {frames[-1].batch}: last {len(frames)} {phase}frames", style="bold"))
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
