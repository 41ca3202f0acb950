"""The first bad element of a sum over the ranks, in what each rank has put in: a line of evidence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...core.events import ReducedElement
from ...core.values import DTYPE_MAX
from ..facts.diagnosis import number_text

_MOST_SHOWN = 4


class RankSummand(NamedTuple):
    """What one rank has put into a sum."""

    rank: int
    element: ReducedElement | None
    """None: the rank did not look."""
    largest: float | None
    """abs max of all that it has put in; None: unknown."""


def element_line(what: str, summands: Sequence[RankSummand], dtype: str) -> str:
    """`element [3, 5] of grad weight: 4.10e+04 on rank 0, 3.90e+04 on rank 1; their sum is beyond 65504 (float16)`

    "" where no rank knows what it had there, or the ranks have read different elements.
    """
    places = {tuple(each.element.index) for each in summands if each.element is not None}
    known = {
        each.rank: each.element.own for each in summands if each.element is not None and each.element.own is not None
    }
    if len(places) != 1 or not known:
        return ""
    rest = {each.rank: each.largest for each in summands if each.rank not in known}
    given = [f"{number_text(known[rank])} on rank {rank}" for rank in sorted(known, key=lambda rank: -abs(known[rank]))]
    given += [f"at most {number_text(largest)} on rank {rank}" for rank, largest in rest.items() if largest is not None]
    given += [f"unknown on rank {rank}" for rank, largest in rest.items() if largest is None]
    more = f", and {len(given) - _MOST_SHOWN} more ranks" if len(given) > _MOST_SHOWN else ""
    shown = f"element {list(*places)} of {what}: {', '.join(given[:_MOST_SHOWN])}{more}"
    return shown + _beyond(list(known.values()), list(rest.values()), dtype)


def _beyond(known: list[float], rest: list[float | None], dtype: str) -> str:
    limit = DTYPE_MAX.get(dtype)
    if limit is None or None in rest:
        return ""
    bound = sum(each for each in rest if each is not None)
    up, down = sum(each for each in known if each > 0), -sum(each for each in known if each < 0)
    if abs(up - down) - bound > limit:
        return f"; their sum is beyond {limit:.6g} ({dtype})"
    return f"; some of them alone are beyond {limit:.6g} ({dtype})" if max(up, down) > limit else ""
