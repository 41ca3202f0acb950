"""Ranks and other numbers in words: `ranks 0-3, 7`."""

from __future__ import annotations

from collections.abc import Iterable

from ..recorder.lone_process import is_rank, rank_name

MOST_PIECES = 8


def ranks_text(ranks: Iterable[int], most: int = MOST_PIECES) -> str:
    """In ascending order: `rank 3`, `ranks 0, 1`, `ranks 0-3, 7`. Beyond `most` pieces the rest is counted.

    >>> ranks_text([7, 0, 1, 2, 3])
    'ranks 0-3, 7'
    >>> ranks_text(range(0, 10, 2), most=2)
    'ranks 0, 2 and 3 more'
    """
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    processes = [rank_name(number) for number in reversed(ordered) if not is_rank(number)]
    ordered = ordered[len(processes) :]
    if processes:
        named = [*([ranks_text(ordered, most)] if ordered else []), *processes[:most]]
        return ", ".join(named) + (f" and {len(processes) - most} more" if len(processes) > most else "")
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {numbers_text(ordered, most)}"


def numbers_text(numbers: Iterable[int], most: int = MOST_PIECES) -> str:
    """In ascending order, without a noun. Beyond `most` pieces the rest is counted.

    >>> numbers_text([4, 0, 1, 2])
    '0-2, 4'
    >>> numbers_text([])
    'none'
    """
    pieces = _pieces(sorted(set(numbers)))
    shown = pieces[:most]
    left = sum(last - first + 1 for first, last in pieces[most:])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in shown)
    return (text or "none") + (f" and {left} more" if left else "")


def _pieces(ordered: list[int]) -> list[tuple[int, int]]:
    """(first, last) of each run. Two neighbours are two pieces: `0, 1` reads better than `0-1`."""
    rows: list[tuple[int, int]] = []
    for rank in ordered:
        if rows and rows[-1][1] == rank - 1:
            rows[-1] = (rows[-1][0], rank)
        else:
            rows.append((rank, rank))
    return [
        piece
        for first, last in rows
        for piece in ([(first, last)] if last != first + 1 else [(first, first), (last, last)])
    ]
