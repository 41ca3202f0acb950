"""How ranks, modules, threads, sizes, shares and times are written in sentences."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ...core.codes import CODE
from ...core.events.rank_standing import ThreadSeen
from ...core.identity import is_rank, rank_name
from ...core.text import ranks_text as text_of_many

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_MOST_NAMED = 16
"""Up to this many ranks are named one by one."""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """key -> the items with that key, in order; they share a line."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def ranks_text(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 2`; for many ranks `ranks 0-41, 43-1023`."""
    if len(ranks) > _MOST_NAMED or (len(ranks) > 1 and not all(map(is_rank, ranks))):
        return text_of_many(ranks)
    if len(ranks) == 1:
        return rank_name(ranks[0])
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`, `0 steps`"""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def one_on(number: int, host: str = "") -> str:
    """`Rank 3 on node7`, to begin a sentence."""
    name = rank_name(number)
    return f"{name[0].upper()}{name[1:]}{f' on {host}' if host else ''}"


def where_text(ranks: Iterable[int], all_ranks: Sequence[int]) -> str:
    """`on all 8 ranks`, `on rank 3`.

    >>> where_text([0, 1], [0, 1]), where_text([3], [0, 1, 2, 3]), where_text([0], [0])
    ('on both ranks', 'on rank 3', 'on rank 0')
    """
    found = sorted(set(ranks))
    if len(found) > 1 and len(found) == len(set(all_ranks)):
        return "on both ranks" if len(found) == 2 else f"on all {len(found)} ranks"
    return f"on {text_of_many(found)}"


def modules_text(modules: Sequence[str]) -> str:
    """`41 modules`; a few by their names.

    >>> modules_text(["fc1"]), modules_text(["fc1", ""]), modules_text(["a", "b", "c", "d"])
    ('`fc1`', '`fc1` and the root', '4 modules (`a`, `b`, ...)')
    """
    names = [f"`{module}`" if module else "the root" for module in modules]
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} modules ({names[0]}, {names[1]}, ...)"


def share_text(share: float) -> str:
    """`23%`; below 10 % with a digit more."""
    return f"{share:.0%}" if share >= 0.0995 or not share else f"{share:.1%}"


def coarse_share_text(share: float) -> str:
    """`12%`. A share above zero is never written as 0%.

    >>> coarse_share_text(0.0004)
    '<1%'
    """
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def badness(kind: str, headroom: float | None, subnormals: float | None, zeros: float | None) -> tuple[bool, float]:
    """Sorts rows near a limit: those near overflow with the least room first, then those that have lost the most."""
    near = kind == "near overflow"
    left = headroom if headroom is not None else 1e9
    return not near, left if near else -max(subnormals or 0.0, zeros or 0.0)


def bytes_text(size: int) -> str:
    """`16 MiB`; in bytes if the size is no whole number of a unit.

    >>> bytes_text(16 << 20), bytes_text(1000)
    ('16 MiB', '1000 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """`40 s`, `12 min`"""
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def when_text(at_s: float, event: str) -> str:
    """`35 s before the overflow`, `at the overflow`"""
    if abs(at_s) < 1:
        return f"at {event}"
    return f"{time_text(abs(at_s))} {'before' if at_s < 0 else 'after'} {event}"


def thread_text(thread: ThreadSeen) -> str:
    """`thread python3, which sleeps, in clock_nanosleep (hrtimer_nanosleep of the kernel)`"""
    parts = [f"thread {thread.name or '(no name)'}"]
    if thread.state:
        parts.append(_STATES.get(thread.state, f"in state {thread.state}"))
    if thread.system_call or thread.kernel:
        kernel = f"{thread.kernel} of the kernel" if thread.kernel else ""
        call = thread.system_call
        parts.append(f"in {call} ({kernel})" if call and kernel else f"in {call or kernel}")
    if thread.at:
        parts.append(f"at {thread.at}")
    return ", ".join(parts)


_STATES = {
    "R": "which runs",
    "S": "which sleeps",
    "D": "which waits for a disk or a driver, and no signal reaches it",
    "T": "which a signal has stopped",
    "t": "which a debugger has stopped",
    "Z": "which has ended",
}


_UNIT = re.compile(r"(?:gpuwatch [a-z]+ (?:--[a-z-]+ )*)?(?:'/[^'\n]*'|/)\S*(?: --[a-z-]+(?: [0-9N]+)?)*[,;.]?|\S+")
"""What stands on one line: a word, or a path as a shell takes it, with the command that it is a part of."""


@dataclass(frozen=True)
class WrappedText:
    """A text whose lines are broken between words. A path that is longer than a line stays whole, to be copied."""

    text: Text
    before: str = ""
    """What stands before the first line. The others are indented as far."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines."""
        width = max(1, options.max_width - cell_len(self.before))
        lines = self.text.divide(_line_breaks(self.text.plain, width))
        for number, line in enumerate(lines):
            line.rstrip()
            whole = Text.assemble(self.before if number == 0 else " " * cell_len(self.before), line)
            whole.no_wrap, whole.overflow = True, "ignore"
            yield whole


def _line_breaks(text: str, width: int) -> list[int]:
    """Where the second line begins, and those after it."""
    breaks: list[int] = []
    used = end = 0
    for unit in _UNIT.finditer(text):
        used += cell_len(text[end : unit.start()])
        at, end = unit.start(), unit.end()
        for piece in [unit[0]] if "/" in unit[0] else chop_cells(unit[0], width):
            if at and used + cell_len(piece) > width:
                breaks.append(at)
                used = 0
            used += cell_len(piece)
            at += len(piece)
    return breaks


def list_item(text: Text | str, style: str = "", *, mark: str = "- ") -> WrappedText:
    """`  - text`. Its further lines stand below its first word, and codes are dim."""
    return WrappedText(dim_codes(Text(text, style) if isinstance(text, str) else text), f"  {mark}")


def dim_codes(text: Text) -> Text:
    """The same text, with `[GW203]` where the eye does not stop."""
    text.highlight_regex(rf"\[{CODE.pattern}\]", "dim")
    return text


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

    def print(self, *objects: Any, **given: Any) -> None:
        """As rich does, and what is longer than a line is not cut."""
        super().print(*objects, **{"crop": False, **given})

    def text(self) -> str:
        """All that was printed, without blanks at the ends of lines and without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self._kept.getvalue().splitlines()).rstrip("\n")


def elapsed_text(seconds: float) -> str:
    """`0:04:07`, `3 days 2:00:00`"""
    return str(timedelta(seconds=int(max(0.0, seconds)))).replace(",", "")
