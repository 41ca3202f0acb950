"""The upright axis of a chart of abs max: linear, or logarithmic where the values span decades. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_DECADES = 1.5
"""Values that span at least so many are on a logarithmic axis."""
_MARGIN = 0.05
"""Room above and below the values, as a share of what they span."""
_LARGEST, _SMALLEST = 1.7e308, 1e-300
"""The ends of a linear axis can be computed between these."""
_MOST_TICKS = 7
_LEAST_POWERS = 3
"""With fewer powers of ten on it, a logarithmic axis has ticks at 2 and 5 times those, too."""


class ValueAxis(NamedTuple):
    """Its ends, as values or as their logarithms to base 10."""

    low: float
    high: float
    is_logarithmic: bool

    def share(self, value: float) -> float:
        """How far up a value is: 0 at the lower end, 1 at the upper one. What lies beyond an end is put there."""
        if self.is_logarithmic:
            value = math.log10(value) if value > 0 else self.low
        return (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values from the lower end to the upper one, at most `_MOST_TICKS` of them, with their labels.

        >>> ValueAxis(-0.2, 4.9, True).ticks()[:3], ValueAxis(1.8, 2.6, False).ticks()[1:3]
        ([(1.0, '1'), (10.0, '10'), (100.0, '100')], [(2.0, '2.0'), (2.2, '2.2')])
        """
        return _powers(self.low, self.high) if self.is_logarithmic else _steps(self.low, self.high)


def axis_of(values: Sequence[float], limit: float | None, *, logarithmic: bool = False) -> ValueAxis | None:
    """The axis for finite values, none below zero, and for a `limit` that it holds, too; None if none is above zero.

    `logarithmic`: in any case, as for a forecast, which is a straight line there.
    """
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    least, most = min(positive), max(*positive, limit or 0.0)
    span = math.log10(most) - math.log10(least)  # the quotient of the two may overflow
    if logarithmic or span >= _DECADES or most < _SMALLEST:
        margin = 0.15 if span > 0.2 else 0.5
        return ValueAxis(math.log10(least) - margin, math.log10(most) + margin, True)
    least = min(values)
    margin = _MARGIN * (most - least) or 0.1 * most
    return ValueAxis(max(0.0, least - margin), min(most + margin, _LARGEST), False)


def _powers(low: float, high: float) -> list[tuple[float, str]]:
    first, last = math.ceil(low), math.floor(high)
    every = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    powers = range(first, last + 1, every)
    if len(powers) >= _LEAST_POWERS:
        return [(_power(power), _label(1, power)) for power in powers]
    digits = [(digit, power) for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
    inside = [(digit, power) for digit, power in digits if low <= math.log10(digit) + power <= high]
    return [(digit * _power(power), _label(digit, power)) for digit, power in inside]


def _power(power: int) -> float:
    return float(f"1e{power}")


def _label(digit: int, power: int) -> str:
    return f"{digit * _power(power):g}" if -3 <= power <= 4 else f"{digit}e{power}"


def _steps(low: float, high: float) -> list[tuple[float, str]]:
    wide = (high - low) / (_MOST_TICKS - 1)
    power = math.floor(math.log10(wide))
    step = next(digit * _power(power) for digit in (1, 2, 5, 10) if digit * _power(power) >= wide * (1 - 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, _step_label(number * step, step)) for number in numbers]


def _step_label(value: float, step: float) -> str:
    """As many digits as tell it from the next tick."""
    after_point = -math.floor(math.log10(step) + 1e-9)
    if value == 0 or 1e-4 <= value < 1e6:
        return f"{value:.{max(0, after_point)}f}" if value else "0"
    return f"{value:.{max(0, after_point + math.floor(math.log10(value)))}e}"
