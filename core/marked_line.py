"""A line of code, cut around the part of it that is meant."""

from __future__ import annotations

from typing import NamedTuple

DOTS = "..."
CODE_WIDTH = 60
"""Of a line in a message or a table."""


class MarkedLine(NamedTuple):
    """A line of code, or what is left of it. `first` and `end` are the columns of the operation in `text`."""

    text: str
    first: int
    end: int

    @property
    def parts(self) -> tuple[str, str, str]:
        """What stands before the operation, the operation, and what stands behind it."""
        return self.text[: self.first], self.text[self.first : self.end], self.text[self.end :]


def cut_line(code: str, columns: tuple[int, int], width: int) -> MarkedLine:
    """At most `width` characters of a line, with the operation in `columns`; dots stand for what was left out.

    Of an operation that is longer than `width`, the beginning is shown. If there is room for the operation and none for
    the dots, these stand outside of `width`.

    >>> cut_line("h = s.n(x); a = s.q(h) @ s.k(h); return a", (16, 31), 25)
    MarkedLine(text='...= s.q(h) @ s.k(h); ...', first=5, end=20)
    >>> cut_line("h = s.n(x); a = s.q(h) @ s.k(h); return a", (16, 31), 10)
    MarkedLine(text='...s.q(h) @ s...', first=3, end=13)
    """
    first = min(max(0, columns[0]), len(code))
    end = min(max(first, columns[1]), len(code))
    room = max(1, width - 2 * len(DOTS), min(end - first, width))
    if len(code) <= max(width, room + 2 * len(DOTS)):
        return MarkedLine(code, first, end)
    left = max(0, first - max(0, room - (end - first)) // 2)
    right = left + room
    if left <= len(DOTS):  # dots are no shorter than what they stand for
        left, right = 0, room + len(DOTS)
    elif right >= len(code) - len(DOTS):
        left, right = len(code) - room - len(DOTS), len(code)
    before, behind = DOTS if left > 0 else "", DOTS if right < len(code) else ""
    moved = len(before) - left
    return MarkedLine(f"{before}{code[left:right]}{behind}", first + moved, min(end, right) + moved)


def shown_line(code: str, columns: tuple[int, int] | None, width: int) -> str:
    """The text of a line for which there is room of `width`. Where the operation's columns are unknown: its beginning.

    >>> shown_line("h = s.n(x); return h", None, 12)
    'h = s.n(x...'
    """
    return cut_line(code, columns or (0, min(len(code), max(1, width - 2 * len(DOTS)))), width).text
