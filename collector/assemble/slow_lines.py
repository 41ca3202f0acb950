"""Where a slow rank was in its own time: the line of its script that takes longer, from looks at its stack. Pure.

A line is named only if it has most of what the rank takes beyond the others. The looks are of the slow rank alone: what
the others do at that line is not known, and can be all of their own time. So with its share p of the looks

    p * slow - others >= (slow - others) / 2

where slow and others are seconds of own time in a step. What a rank computes as the others do is not named for it.
"""

from __future__ import annotations

import math
from pathlib import PurePath

from ...core.events.agent_events import SeenLine, SlowRankLooks
from ..report.run_figures import SlowLine

_LEAST_LOOKS = 8
_MOST_TOLD = 2


def lines_of(seen: SlowRankLooks) -> list[SlowLine]:
    """As report.json has them."""
    return [
        SlowLine(each.line.file, each.line.line, each.line.function, each.line.text, each.calls, each.count)
        for each in seen.lines
    ]


def where_it_was(seen: SlowRankLooks | None, own_s: float, others_s: float) -> str:
    """A sentence: the line that has most of the difference, or those that may; "" after too few looks.

    `own_s`, `others_s`: own time in a step of the slow rank, and of the others.
    """
    if seen is None or seen.looks < _LEAST_LOOKS:
        return ""
    if not seen.lines:
        return f"{seen.looks} looks at its stack show no line of the script."
    first = seen.lines[0]
    if _has_most(first.count, seen.looks, own_s, others_s):
        return f"In {first.count} of {seen.looks} looks at its stack it was at {_place(first)}."
    most = " and ".join(f"{each.count} times at {_place(each)}" for each in seen.lines[:_MOST_TOLD])
    return (
        f"In {seen.looks} looks at its stack it was {most}; which line takes longer than on the others is not certain."
    )


def _place(seen: SeenLine) -> str:
    line = seen.line
    code = f": `{line.text}`" if line.text else ""
    calls = f", in {seen.calls}" if seen.calls else ""
    return f"{PurePath(line.file).name}:{line.line} in {line.function}{code}{calls}"


def _has_most(count: int, looks: int, own_s: float, others_s: float) -> bool:
    if own_s <= 0:
        return False
    share = (count + 1) / (looks + 2)  # so that the spread of "all of a few looks" is not 0
    spread = math.sqrt(share * (1 - share) / looks)
    return count / looks - spread >= (own_s + min(others_s, own_s)) / (2 * own_s)
