"""A square for each rank. Ranks that ended in the same way, or that stand at the same place, have one look."""

from __future__ import annotations

from typing import NamedTuple

from ....core.text.ranks_text import ranks_text
from ..model import RankReport, Report
from ..stacks import own_lines

LOOKS = "ABCDEFGH"
"""A letter each: nobody has to tell them apart by their colour alone."""
_WIDTH = 640


class Square(NamedTuple):
    """One rank."""

    rank: int
    x: int
    y: int
    look: str
    named: bool


class Group(NamedTuple):
    """Ranks that are alike."""

    look: str
    ranks: str
    text: str
    """What became of them, or where they stand."""


class RankGrid(NamedTuple):
    """What the template draws."""

    title: str
    squares: list[Square]
    side: int
    width: int
    height: int
    groups: list[Group]


def rank_grid(report: Report) -> RankGrid | None:
    """None without ranks."""
    if not report.ranks:
        return None
    hang = report.verdict.kind == "hang" and any(rank.stack for rank in report.ranks)
    alike: dict[str, list[int]] = {}
    for rank in report.ranks:
        alike.setdefault(_place(rank) if hang else _ending(rank), []).append(rank.rank)
    named = [text for text, ranks in alike.items() if report.verdict.rank in ranks]
    order = sorted(alike, key=lambda text: (text not in named, -len(alike[text]), alike[text]))
    shown, others = order[: len(LOOKS) - 1], order[len(LOOKS) - 1 :]
    groups = [Group(LOOKS[n], ranks_text(alike[text]), text) for n, text in enumerate(shown)]
    looks = {rank: LOOKS[n] for n, text in enumerate(shown) for rank in alike[text]}
    if others:
        left = [rank for text in others for rank in alike[text]]
        groups.append(Group(LOOKS[-1], ranks_text(left), f"{len(others)} other ways"))
        looks.update(dict.fromkeys(left, LOOKS[-1]))
    side = next(
        side
        for side in (64, 48, 40, 32, 26, 20, 16, 12, 9, 6, 4)
        if _height(len(report.ranks), side) <= 240 or side == 4
    )
    columns = max(1, _WIDTH // side)
    squares = [
        Square(rank.rank, n % columns * side, n // columns * side, looks[rank.rank], rank.rank == report.verdict.rank)
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
    """The first line of its stack that is the user's."""
    lines = own_lines(rank.stack)
    return (lines[1] if len(lines) > 1 else lines[0]) if lines else "did not say where it stands"
