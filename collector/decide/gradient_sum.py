"""Whether a sum over the ranks can have made a gradient non-finite: what the numbers of all ranks say. Pure.

own gradients of 4e4 and 4e4 in float16      the sum of 8e4 is beyond 65504: it is inf
own gradients of 0.06 and 0 in float32       no sum of them is inf: other code has made it
nan                                          is no sum of finite numbers
inf on one rank, finite on another           a sum is the same on all ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...core.frames import Row, format_number
from ...core.values import DTYPE_MAX, NonFinite

Answer = Literal["sum", "narrower", "no"]
"""sum         the sum is beyond the largest number of the gradient's dtype
narrower    it is not, but it is beyond that of float16: a reduction in float16 gives inf
no          no sum over the ranks gives that value
"""

_NARROWER = "float16"
_MOST_SHOWN = 4


@dataclass(frozen=True)
class GradientSum:
    """One gradient: what each rank's own backward made, and what the optimizers of the ranks got."""

    own: Mapping[int, Row]
    """Rank -> its own gradient, the largest of the step."""
    got: Mapping[int, Row]
    """Rank -> what its optimizer got. A rank that was stopped before its step is not in it."""

    @property
    def bound(self) -> float:
        """No element of the sum is larger."""
        return sum(row.abs_max or 0.0 for row in self.own.values())

    @property
    def is_alike(self) -> bool:
        """Whether nothing contradicts that all ranks got the same."""
        return len({(row.nan, _has_inf(row)) for row in self.got.values()}) <= 1

    @property
    def answer(self) -> Answer:
        """Whether a sum can have made what the optimizers got."""
        bad = [row for row in self.got.values() if not row.finite]
        if not bad or not all(map(_has_inf, bad)):
            return "no"
        limits = [DTYPE_MAX.get(row.dtype, 0.0) for row in bad]
        if self.bound > min(limits):
            return "sum"
        return "narrower" if self.bound > DTYPE_MAX[_NARROWER] else "no"

    @property
    def is_proven(self) -> bool:
        """Whether the sum explains all that was seen. Inf less inf is nan, but that no frame shows."""
        return self.answer == "sum" and self.is_alike and not any(row.nan for row in self.got.values())

    def line(self) -> str:
        """What each rank's own gradient was, against the limit."""
        shown = [f"{_size(row)} on rank {rank}" for rank, row in sorted(self.own.items())[:_MOST_SHOWN]]
        more = len(self.own) - len(shown)
        dtype = next(iter(self.got.values())).dtype
        limit = f"; {dtype} ends at {format_number(DTYPE_MAX[dtype]).strip()}" if dtype in DTYPE_MAX else ""
        return (
            f"abs max of the own gradients: {', '.join(shown)}{f', and {more} more ranks' if more else ''}; "
            f"their sum is at most {format_number(self.bound).strip()}{limit}"
        )

    def all_zero(self) -> bool:
        """Whether every rank's own gradient was 0 throughout."""
        return all(row.abs_max == 0 for row in self.own.values())


def _has_inf(row: Row) -> bool:
    return bool(row.flags & (NonFinite.POSINF | NonFinite.NEGINF | NonFinite.INF))


def _size(row: Row) -> str:
    return format_number(row.abs_max).strip()
