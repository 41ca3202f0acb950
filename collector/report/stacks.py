"""Where the ranks stood when they were asked: their stacks, those that are the same together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...core.stalls import is_users
from ...core.text.ranks_text import ranks_text
from ..facts.facts import RankFacts

if TYPE_CHECKING:
    from .model import RankReport

MOST_LINES = 12
"""Of each stack, in the text. report.json has more."""


def stack_of(rank: RankFacts) -> list[str]:
    """The rank's last stack, innermost call first: `/home/me/train.py:41 in main: dist.all_reduce(loss)`."""
    return [line.shown for line in rank.looks[-1].stack] if rank.looks else []


def stacks_text(ranks: Iterable[RankReport]) -> Iterator[str]:
    """Lines: ranks that stand at the same place share one stack."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        if rank.stack:
            groups.setdefault(tuple(rank.stack), []).append(rank.rank)
    for stack, numbers in groups.items():
        yield f"Where {ranks_text(numbers)} stood, innermost call first (calls inside of torch are left out)"
        yield from (f"  {line}" for line in own_lines(list(stack))[:MOST_LINES])


def own_lines(stack: list[str]) -> list[str]:
    """The innermost call, and below it the user's own lines; [] of an empty stack."""
    return list(dict.fromkeys([*stack[:1], *(line for line in stack if is_users(line))]))
