"""How ranks are written in sentences."""

from __future__ import annotations

from ...core.lone_process import is_rank, rank_name
from ...core.text import ranks_text as text_of_many

_MOST_NAMED = 16
"""So many ranks are named one by one."""


def ranks_text(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 2`; of many ranks `ranks 0-41, 43-1023`."""
    if len(ranks) > _MOST_NAMED or (len(ranks) > 1 and not all(map(is_rank, ranks))):
        return text_of_many(ranks)
    if len(ranks) == 1:
        return rank_name(ranks[0])
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def one_on(number: int, host: str = "") -> str:
    """`Rank 3 on node7`, to begin a sentence."""
    name = rank_name(number)
    return f"{name[0].upper()}{name[1:]}{f' on {host}' if host else ''}"
