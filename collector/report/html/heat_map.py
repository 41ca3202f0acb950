"""The heat map: modules in the order of their calls, ranks beside each other, each cell with its number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ....core.text import ranks_text
from ....core.values import headroom
from ....core.verdicts import VerdictKind
from ....core.wire.columns import NO_NUMBER
from ..model import ModulesByRanks, RunReport
from ..side_by_side import ModuleCell, rank_to_show, side_by_side

_MOST_RANKS = 32
_MOST_ROWS = 120
LEVELS = 8
"""How much room is left up to the dtype's limit: level 7 is less than one power of two, 0 is 64 or more."""


class HeatCell(NamedTuple):
    """`level` is "" where there is no number."""

    text: str
    level: str
    title: str


class HeatRow(NamedTuple):
    """One module."""

    title: str
    module: str
    named: bool
    """The verdict is about it."""
    cells: list[HeatCell]


class RankStretch(NamedTuple):
    """Ranks beside each other whose cells have one level."""

    x: int
    width: int
    level: str
    first: int
    """The first of these ranks."""
    title: str


class HeatMap(NamedTuple):
    """What the template draws."""

    caption: str
    ranks: list[int]
    rows: list[HeatRow]
    left_out: int
    legend: list[tuple[str, str]]
    """(level, what it means)"""
    overview: Sequence[tuple[str, list[RankStretch]]] = ()
    """Where there are more ranks than columns: for each module all of them, without numbers."""
    num_ranks: int = 0


def heat_map(report: RunReport) -> HeatMap | None:
    """From the history, where there is one; else from frames; None where no frames of two ranks can be compared."""
    if report.by_module is not None and len(report.by_module.ranks) > 1:
        return _from_history(report, report.by_module)
    shown = rank_to_show(report)
    found = side_by_side(report, shown, _MOST_RANKS, _MOST_ROWS) if shown is not None else None
    if found is None:
        return None
    columns = sorted(range(len(found.columns)), key=lambda n: found.columns[n].rank)
    ranks = [found.columns[n].rank for n in columns]
    rows = [
        HeatRow(
            row.title,
            row.module,
            report.verdict.kind == VerdictKind.OVERFLOW and row.module == report.verdict.module,
            [_cell(row.cells[n], found.columns[n].rank, row.title) for n in columns],
        )
        for row in found.rows
    ]
    return HeatMap(f"abs max of the {found.what} in batch {found.batch}", ranks, rows, found.left_out, legend())


def _from_history(report: RunReport, found: ModulesByRanks) -> HeatMap:
    columns = _columns(report, found.ranks)
    rows = []
    for n, module in enumerate(found.modules):
        title = f"{module.module or '(root)'} {module.cls}"
        numbers = [found.abs_max[column][n] for column in columns]
        rows.append(
            HeatRow(
                title,
                module.module,
                module.module == report.verdict.module,
                [
                    _cell(_heat_cell(number, module.dtype), found.ranks[column], title)
                    for column, number in zip(columns, numbers, strict=True)
                ],
            )
        )
    ranks = [found.ranks[column] for column in columns]
    left_out = len(report.ranks) - len(ranks)
    overview = _overview(found) if len(found.ranks) > len(ranks) else []
    caption = f"abs max of the outputs in batch {found.batch}"
    return HeatMap(caption, ranks, rows, left_out, legend(), overview, len(found.ranks))


def _overview(found: ModulesByRanks) -> list[tuple[str, list[RankStretch]]]:
    rows = []
    for n, module in enumerate(found.modules):
        levels = [level_of(_heat_cell(numbers[n], module.dtype)) for numbers in found.abs_max]
        stretches = []
        for level, places in groupby(range(len(levels)), key=levels.__getitem__):
            run = list(places)
            ranks = ranks_text([found.ranks[place] for place in run])
            title = f"{ranks}: {dict(legend()).get(level, 'not measured')}"
            stretches.append(RankStretch(run[0], len(run), level, found.ranks[run[0]], title))
        rows.append((module.module, stretches))
    return rows


def _columns(report: RunReport, ranks: list[int]) -> list[int]:
    met = {entry.rank for entry in report.ranks if entry.first_anomaly is not None}
    order = sorted(range(len(ranks)), key=lambda n: (ranks[n] != report.verdict.rank, ranks[n] not in met, ranks[n]))
    return order[:_MOST_RANKS]


def _heat_cell(number: float | None, dtype: str) -> ModuleCell:
    if number is None:
        return ModuleCell("inf, nan", True)
    if number == NO_NUMBER:
        return ModuleCell("-")
    return ModuleCell(f"{number:.1e}", False, number, headroom(number, dtype))


def _cell(cell: ModuleCell, rank: int, title: str) -> HeatCell:
    left = f", {cell.headroom:.1f} powers of two below the limit" if cell.headroom is not None else ""
    return HeatCell(cell.text.strip(), level_of(cell), f"rank {rank}, {title}: {cell.text.strip()}{left}")


def level_of(cell: ModuleCell) -> str:
    """`bad`, "0" (far from the limit) to "7" (less than one power of two), "" where there is no number."""
    if cell.bad:
        return "bad"
    if cell.value is None:
        return ""
    if cell.headroom is None:
        return "0"
    return str(LEVELS - 1 - min(LEVELS - 1, max(0, math.floor(math.log2(max(cell.headroom, 0.5))) + 1)))


def legend() -> list[tuple[str, str]]:
    """How much is left up to the limit, from much to nothing."""
    words = [f"2^{2 ** (LEVELS - 2 - level)} or more left" for level in range(LEVELS - 1)]
    return [
        *((str(level), text) for level, text in enumerate(words)),
        (str(LEVELS - 1), "less than 2^1 left"),
        ("bad", "inf or nan"),
    ]
