"""The pictures that are tables: a square for each rank, the preflight's stages by nodes, and modules by ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ....core.codes import VerdictKind
from ....core.frames import LOSS_MODULE
from ....core.recorder.stalls import is_users
from ....core.text import ranks_text
from ....core.values import headroom
from ....core.wire.columns import NO_NUMBER
from ..model import RankReport, RunReport
from ..notices_text import stage_rows
from ..preflight_table import StageCell
from ..rank_states import state_text
from ..run_figures import ModulesByRanks
from ..sentence_parts import grouped
from ..side_by_side import ModuleCell, SideBySideRow, rank_to_show, side_by_side

# A square for each rank. Ranks that ended in the same way, or that stand at the same place, have one look.

LOOKS = "ABCDEFGH"
"""A letter each: nobody has to tell them apart by their colour alone."""
_WIDTH = 640
_MOST_LETTERS = 11
"""A word's, in the largest square."""


class RankGrid(NamedTuple):
    """What the template draws."""

    title: str
    squares: list[tuple[int, int, int, str, str]]
    """(rank, x, y, look, a word for what it does or how it ended)"""
    side: int
    width: int
    height: int
    groups: list[tuple[str, str, str]]
    """(look, ranks that are alike, what became of them or where they stand)"""


def rank_grid(report: RunReport) -> RankGrid | None:
    """None without ranks."""
    if not report.ranks:
        return None
    hang = report.verdict.kind == VerdictKind.HANG and any(rank.stack for rank in report.ranks)
    states = {rank.rank: state_text(rank, report.run.starter) for rank in report.ranks}
    groups_of = grouped(report.ranks, _place if hang else lambda rank: states[rank.rank])
    alike = {text: [rank.rank for rank in ranks] for text, ranks in groups_of.items()}
    named = [text for text, ranks in alike.items() if report.verdict.rank in ranks]
    order = sorted(alike, key=lambda text: (text not in named, -len(alike[text]), alike[text]))
    shown, others = order[: len(LOOKS) - 1], order[len(LOOKS) - 1 :]
    groups = [(LOOKS[n], ranks_text(alike[text]), text) for n, text in enumerate(shown)]
    looks = {rank: LOOKS[n] for n, text in enumerate(shown) for rank in alike[text]}
    if others:
        left = [rank for text in others for rank in alike[text]]
        groups.append((LOOKS[-1], ranks_text(left), f"{len(others)} other ways"))
        looks.update(dict.fromkeys(left, LOOKS[-1]))
    num = len(report.ranks)
    side = next(side for side in (64, 48, 40, 32, 26, 20, 16, 12, 9, 6, 4) if side == 4 or _height(num, side) <= 240)
    columns = _WIDTH // side
    places = ((n % columns * side, n // columns * side) for n in range(num))
    squares = [
        (rank.rank, x, y, looks[rank.rank], _short(_function(rank) if hang else states[rank.rank]))
        for rank, (x, y) in zip(report.ranks, places, strict=True)
    ]
    title = "Where each rank is" if hang else "How each rank ended"
    return RankGrid(title, squares, side, _WIDTH, _height(num, side), groups)


def _height(ranks: int, side: int) -> int:
    return -(-ranks // (_WIDTH // side)) * side


def _short(text: str) -> str:
    """`stopped` of `stopped by torchrun`."""
    return (text if len(text) <= _MOST_LETTERS else text.partition(" ")[0])[:_MOST_LETTERS]


def _place(rank: RankReport) -> str:
    """The innermost line of the user's own, as in the verdict; without one the innermost call."""
    return next((line for line in rank.stack if is_users(line)), next(iter(rank.stack), "did not report its position"))


def _function(rank: RankReport) -> str:
    """`all_reduce`: the innermost call; `train.py:41` where the script is in none, `stopped` where a signal has it.

    `backward`, and not `_engine_run_backward`: a name of a library's own is left out if a public one called it.
    """
    inner = rank.stack[0] if rank.stack else ""
    inner = next((line for line in rank.stack if not re.search(r":\d+ in _", line) or is_users(line)), inner)
    if found := re.search(r"([^/]+:\d+) in ([\w<>]+)", inner):
        return found[1] if found[2] == "<module>" else found[2]
    if found := re.match(r"(\w+) of ", inner):
        return found[1]
    return "stopped" if "has stopped" in inner else "no stack"


_MOST_NODES = 12


class StageGrid(NamedTuple):
    """The preflight: nodes by stages."""

    stages: list[str]
    rows: list[tuple[str, list[int], list[StageCell | None]]]
    """A node, or several that are alike: (hosts, ranks, the slowest rank in each stage)"""
    left_out: int


def stage_grid(report: RunReport) -> StageGrid:
    """Each stage on each node; the nodes that are alike together."""
    rows = stage_rows(report.preflight)
    stages = [column.stage for column in report.preflight.stages]
    return StageGrid(stages, rows[:_MOST_NODES], max(0, len(rows) - _MOST_NODES))


# The heat map: modules in the order of their calls, ranks beside each other, each cell with its number.

_MOST_RANKS = 32
_MOST_ROWS = 120
LEVELS = 8
"""How much room is left up to the dtype's limit: level 7 is less than one power of two, 0 is 64 or more."""
LEGEND = {
    **{str(level): f"2^{2 ** (LEVELS - 2 - level)} or more left" for level in range(LEVELS - 1)},
    str(LEVELS - 1): "less than 2^1 left",
    "bad": "inf or nan",
}
"""Level -> what it means, from much to nothing."""


RankStretch = tuple[int, int, str, int, str]
"""Ranks beside each other whose cells have one level: (x, width, level, the first of them, title)"""


class HeatMap(NamedTuple):
    """What the template draws."""

    caption: str
    ranks: list[int]
    rows: list[SideBySideRow]
    """A cell for each of `ranks`."""
    left_out: int
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
    rows = [row._replace(cells=[row.cells[n] for n in columns]) for row in found.rows]
    return HeatMap(f"abs max of the {found.what} in batch {found.batch}", ranks, rows, found.left_out)


def _from_history(report: RunReport, found: ModulesByRanks) -> HeatMap:
    met = {entry.rank for entry in report.ranks if entry.first_anomaly is not None}
    order = sorted(enumerate(found.ranks), key=lambda at: (at[1] != report.verdict.rank, at[1] not in met, at[1]))
    columns = order[:_MOST_RANKS]
    rows = []
    for n, module in enumerate(found.modules):
        title = f"{module.module or '(root)'} {module.cls}" if module.module != LOSS_MODULE else module.module
        cells = [_cell(found.abs_max[at][n], module.dtype) for at, _ in columns]
        rows.append(SideBySideRow(title, module.module, cells))
    return HeatMap(
        f"abs max of the outputs in batch {found.batch}",
        [rank for _, rank in columns],
        rows,
        len(report.ranks) - len(columns),
        _overview(found) if len(found.ranks) > len(columns) else [],
        len(found.ranks),
    )


def _overview(found: ModulesByRanks) -> list[tuple[str, list[RankStretch]]]:
    rows = []
    for n, module in enumerate(found.modules):
        levels = [level_of(_cell(numbers[n], module.dtype)) for numbers in found.abs_max]
        stretches = []
        for level, places in groupby(range(len(levels)), key=levels.__getitem__):
            run = list(places)
            ranks = [found.ranks[place] for place in run]
            title = f"{ranks_text(ranks)}: {LEGEND.get(level, 'not measured')}"
            stretches.append((run[0], len(run), level, ranks[0], title))
        rows.append((module.module, stretches))
    return rows


def _cell(number: float | None, dtype: str) -> ModuleCell:
    if number is None:
        return ModuleCell("inf, nan", True)
    if number == NO_NUMBER:
        return ModuleCell("-")
    return ModuleCell(f"{number:.1e}", False, number, headroom(number, dtype))


def level_of(cell: ModuleCell) -> str:
    """`bad`, "0" (far from the limit) to "7" (less than one power of two), "" where there is no number."""
    if cell.bad:
        return "bad"
    if cell.value is None:
        return ""
    if cell.headroom is None:
        return "0"
    return str(LEVELS - 1 - min(LEVELS - 1, max(0, math.floor(math.log2(max(cell.headroom, 0.5))) + 1)))
