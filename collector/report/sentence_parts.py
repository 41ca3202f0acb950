"""How ranks, sizes, shares and times are written in sentences."""

from __future__ import annotations

import io

from rich.console import Console

from ...core.identity import is_rank, rank_name
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


def share_text(share: float) -> str:
    """`23%`; below 10 % with a digit more."""
    return f"{share:.0%}" if share >= 0.0995 or not share else f"{share:.1%}"


def size_text(size: float) -> str:
    """`245 GiB`, `1.5 MiB`"""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}" if size < 1000 << power else f"{size / (1 << power):.0f} {unit}"
    return f"{size:.0f} B"


def time_text(seconds: float) -> str:
    """`40 s`, `12 min`"""
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def when_text(at_s: float, event: str) -> str:
    """`35 s before the overflow`, `at the overflow`"""
    if abs(at_s) < 1:
        return f"at {event}"
    return f"{time_text(abs(at_s))} {'before' if at_s < 0 else 'after'} {event}"


class TextConsole(Console):
    """A text of `width` characters, printed with rich as on a terminal and kept; `color`: with escape sequences."""

    def __init__(self, width: int, *, color: bool) -> None:
        self._kept = io.StringIO()
        super().__init__(
            file=self._kept,
            width=width,
            force_terminal=color,
            color_system="standard" if color else None,
            highlight=False,
        )

    def text(self) -> str:
        """All that was printed, without blanks at the ends of lines and without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self._kept.getvalue().splitlines()).rstrip("\n")
