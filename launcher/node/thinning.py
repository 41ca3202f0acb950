"""How what is kept of a long run gets coarser with age. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def thinned(rows: Sequence[T], number: Callable[[T], int], every: int) -> list[T]:
    """Of the rows that are older than `every` one of 2 numbers, of those twice as old one of 4, and so on.

    `number` counts the rows as they came.

    >>> thinned(range(12), int, 4)
    [0, 4, 6, 8, 9, 10, 11]
    """
    newest = number(rows[-1])
    kept: dict[tuple[int, int], T] = {}
    for row in rows:
        step = 1 << max(0, ((newest - number(row)) // every).bit_length())
        kept.setdefault((step, number(row) // step), row)
    return list(kept.values())


def spread(rows: Sequence[T], most: int) -> list[T]:
    """At most so many: the newest half of them, and as many of the older ones at even distances."""
    if len(rows) <= most:
        return list(rows)
    newest = rows[-(most // 2) :]
    older = rows[: -(most // 2)]
    left = most - len(newest)
    return [*(older[n * len(older) // left] for n in range(left)), *newest]
