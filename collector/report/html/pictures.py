"""The one picture of the first screen: which it is follows from the kind of the verdict."""

from __future__ import annotations

import math
from typing import NamedTuple

from ....core.text import ranks_text
from ....core.values import DTYPE_MAX
from ....core.verdicts import VerdictKind
from ..model import ModuleHistory, RankReport, RunReport
from ..preflight_text import fold_rows, hosts_text, slowest
from ..side_by_side import ModuleCell, rank_to_show, side_by_side
from ..stack_groups import own_lines
from .chart import ChartSeries, DtypeLimit, GrowthLine, OutputChart, draw, even_ticks

# A square for each rank. Ranks that ended in the same way, or that stand at the same place, have one look.

LOOKS = "ABCDEFGH"
"""A letter each: nobody has to tell them apart by their colour alone."""
_WIDTH = 640


class RankSquare(NamedTuple):
    """One rank."""

    rank: int
    x: int
    y: int
    look: str
    named: bool


class RankGroup(NamedTuple):
    """Ranks that are alike."""

    look: str
    ranks: str
    text: str
    """What became of them, or where they stand."""


class RankGrid(NamedTuple):
    """What the template draws."""

    title: str
    squares: list[RankSquare]
    side: int
    width: int
    height: int
    groups: list[RankGroup]


def rank_grid(report: RunReport) -> RankGrid | None:
    """None without ranks."""
    if not report.ranks:
        return None
    hang = report.verdict.kind == VerdictKind.HANG and any(rank.stack for rank in report.ranks)
    alike: dict[str, list[int]] = {}
    for rank in report.ranks:
        alike.setdefault(_place(rank) if hang else _ending(rank), []).append(rank.rank)
    named = [text for text, ranks in alike.items() if report.verdict.rank in ranks]
    order = sorted(alike, key=lambda text: (text not in named, -len(alike[text]), alike[text]))
    shown, others = order[: len(LOOKS) - 1], order[len(LOOKS) - 1 :]
    groups = [RankGroup(LOOKS[n], ranks_text(alike[text]), text) for n, text in enumerate(shown)]
    looks = {rank: LOOKS[n] for n, text in enumerate(shown) for rank in alike[text]}
    if others:
        left = [rank for text in others for rank in alike[text]]
        groups.append(RankGroup(LOOKS[-1], ranks_text(left), f"{len(others)} other ways"))
        looks.update(dict.fromkeys(left, LOOKS[-1]))
    side = next(
        side
        for side in (64, 48, 40, 32, 26, 20, 16, 12, 9, 6, 4)
        if _height(len(report.ranks), side) <= 240 or side == 4
    )
    columns = max(1, _WIDTH // side)
    squares = [
        RankSquare(
            rank.rank, n % columns * side, n // columns * side, looks[rank.rank], rank.rank == report.verdict.rank
        )
        for n, rank in enumerate(report.ranks)
    ]
    title = "Where each rank stands" if hang else "What became of each rank"
    return RankGrid(title, squares, side, _WIDTH, _height(len(squares), side), groups)


def _height(ranks: int, side: int) -> int:
    return -(-ranks // max(1, _WIDTH // side)) * side


def _ending(rank: RankReport) -> str:
    exit_ = f" ({rank.exit})" if rank.exit not in (0, None) else ""
    error = f": {rank.error['type']}" if rank.error is not None else ""
    return f"{rank.state}{exit_}{error}"


def _place(rank: RankReport) -> str:
    lines = own_lines(rank.stack)
    return (lines[1] if len(lines) > 1 else lines[0]) if lines else "did not say where it stands"


_MOST_LINES = 32
_MOST_NODES = 12


class StageGridRow(NamedTuple):
    """One node, or several that are alike."""

    hosts: str
    cells: list[tuple[str, str]]
    """(grade, seconds)"""


class StageGrid(NamedTuple):
    """The preflight: nodes by stages."""

    title: str
    stages: list[str]
    rows: list[StageGridRow]
    left_out: int


class VerdictPicture(NamedTuple):
    """One of them is there, or none."""

    chart: OutputChart | None = None
    grid: RankGrid | None = None
    stages: StageGrid | None = None


def picture_of(report: RunReport) -> VerdictPicture:
    """The picture that shows the verdict."""
    if report.verdict.kind == VerdictKind.OVERFLOW:
        chart = over_the_batches(report) or along_the_calls(report)
        if chart is not None:
            return VerdictPicture(chart=chart)
    if (report.run.check_only or report.verdict.kind == VerdictKind.PREFLIGHT) and report.preflight.stages:
        return VerdictPicture(stages=stage_grid(report))
    return VerdictPicture(grid=rank_grid(report))


def over_the_batches(report: RunReport) -> OutputChart | None:
    """abs max of what the verdict's module returned, over the batches, a line for each rank."""
    history = report.history
    if history is None or report.verdict.batch is None:
        return None
    named = next((series for series in history.ranks if series.rank == report.verdict.rank), None)
    if named is None or len(named.batches) < 2 or None not in named.abs_max:  # a gradient was bad, or a weight
        return None
    series = [
        ChartSeries(
            f"rank {each.rank}",
            "named" if each is named else "other",
            [(batch, math.inf if y is None else y) for batch, y in zip(each.batches, each.abs_max, strict=True)],
            each.rank,
        )
        for each in sorted(history.ranks, key=lambda each: each is named)
    ]
    first = min(series.batches[0] for series in history.ranks)
    last = max(series.batches[-1] for series in history.ranks)
    limit = DtypeLimit(history.dtype, history.limit) if history.limit is not None else None
    others = f"; {history.left_out} more ranks are in the store" if history.left_out else ""
    return draw(
        f"abs max of the output of {history.module or 'the root module'}, batch by batch",
        f"A line for each of {len(series)} ranks; rank {named.rank} is the thick one{others}. "
        f"In batch {report.verdict.batch} it was no longer finite.",
        "batch",
        series,
        even_ticks(first, last),
        limit,
        (report.verdict.batch, ""),
        _growth(report, history, first, last),
    )


def _growth(report: RunReport, history: ModuleHistory, first: int, last: int) -> GrowthLine | None:
    told = next((each for each in report.forecasts if each.module == history.module), None)
    batch = report.verdict.batch
    if told is None or batch is None or told.dtype != history.dtype or not first <= told.batch < min(batch, last):
        return None
    ahead = batch - told.batch
    where = "before" if ahead < told.earliest else "after" if ahead > told.latest else "in"
    middle, earliest, latest = (told.batch + ahead for ahead in (told.after, told.earliest, told.latest))
    return GrowthLine(
        told.batch,
        told.abs_max,
        told.limit,
        middle,
        earliest,
        latest,
        f"told in batch {told.batch}",
        f"forecast, told in batch {told.batch} of rank {told.rank}: to pass the limit in batch {middle} ({earliest} to "
        f"{latest}); it did in batch {batch}, {where} that range",
    )


def along_the_calls(report: RunReport) -> OutputChart | None:
    """abs max from call to call at the failing batch, a line for each rank."""
    shown = rank_to_show(report)
    if shown is None:
        return None
    found = side_by_side(report, shown, _MOST_LINES, len(shown.frames))
    if found is None:
        return None
    series = [
        _series(rank, [row.cells[n] for row in found.rows], rank is shown) for n, rank in enumerate(found.columns)
    ]
    last = len(found.rows) - 1
    named = report.verdict.module or "the root"
    return draw(
        f"abs max of the {found.what}, call by call, in batch {found.batch}",
        f"A line for each of {len(series)} ranks. Rank {shown.rank} is the thick one; it ends at {named}.",
        "calls in their order",
        list(reversed(series)),
        [(n, "") for n in range(len(found.rows))],
        _limit(report),
        (last, named),
    )


def _series(rank: RankReport, cells: list[ModuleCell], named: bool) -> ChartSeries:
    points = [(float(n), math.inf if cell.bad else cell.value or None) for n, cell in enumerate(cells)]
    return ChartSeries(f"rank {rank.rank}", "named" if named else "other", points, rank.rank)


def _limit(report: RunReport) -> DtypeLimit | None:
    dtype = report.verdict.dtype or ""
    return DtypeLimit(dtype, DTYPE_MAX[dtype]) if dtype in DTYPE_MAX else None


def stage_grid(report: RunReport) -> StageGrid:
    """Each stage on each node; the nodes that are alike together."""
    stages = [column.stage for column in report.preflight.stages]
    rows = []
    folded = fold_rows(report.preflight.nodes)
    for nodes in folded[:_MOST_NODES]:
        cells = [slowest(node.stages.get(stage) for node in nodes) for stage in stages]
        rows.append(
            StageGridRow(
                hosts_text(nodes),
                [(cell.grade, f"{cell.seconds:.1f}") if cell is not None else ("", "") for cell in cells],
            )
        )
    title = "Preflight: each stage on each node, with the seconds of its slowest rank"
    return StageGrid(title, stages, rows, len(folded) - len(rows))
