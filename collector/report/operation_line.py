"""The script's line in which a value overflowed, cut around the part of it that is the operation.

    `...": x}[name]; a = s.q(h) @ s.k(h).transpose(-2, -1) * 0.5; a = a if ...`

The verdict's evidence has the whole line. The text is cut when it is printed, and the page marks the part.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.events import BadOperation
from .model import Verdict

_DOTS = "..."
_AROUND = len("  - ``,")
"""What an item of a list has beside the line."""
_LEAST_WIDTH = 20
_MOST_LINES = 3
"""Lines of a terminal that a long operation takes."""


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
    room = max(1, width - 2 * len(_DOTS), min(end - first, width))
    if len(code) <= max(width, room + 2 * len(_DOTS)):
        return MarkedLine(code, first, end)
    left = max(0, first - max(0, room - (end - first)) // 2)
    right = left + room
    if left <= len(_DOTS):  # dots are no shorter than what they stand for
        left, right = 0, room + len(_DOTS)
    elif right >= len(code) - len(_DOTS):
        left, right = len(code) - room - len(_DOTS), len(code)
    before, behind = _DOTS if left > 0 else "", _DOTS if right < len(code) else ""
    moved = len(before) - left
    return MarkedLine(f"{before}{code[left:right]}{behind}", first + moved, min(end, right) + moved)


def evidence_lines(verdict: Verdict, width: int) -> list[str]:
    """The evidence for a terminal of that width, in which the line of the operation is cut to one line.

    An operation that needs more room has up to three lines.
    """
    operation, room = verdict.operation, max(_LEAST_WIDTH, width - _AROUND)
    if operation is None or operation.columns is None:
        return verdict.evidence
    needed = operation.columns[1] - operation.columns[0] + 2 * len(_DOTS)
    line = cut_line(operation.code, operation.columns, max(room, min(needed, _MOST_LINES * room)))
    lines = []
    for reason in verdict.evidence:
        marked, rest = operation_in(operation, reason)
        lines.append(f"`{line.text}`{rest}" if marked is not None else reason)
    return lines


def operation_in(operation: BadOperation | None, reason: str) -> tuple[MarkedLine | None, str]:
    """(the line of an operation with which a sentence begins, the rest of it); (None, the sentence) if it has none."""
    if operation is None or operation.columns is None or not operation.code:
        return None, reason
    quoted = f"`{operation.code}`"
    if not reason.startswith(f"{quoted}, "):  # as operation_text begins
        return None, reason
    return cut_line(operation.code, operation.columns, len(operation.code)), reason.removeprefix(quoted)
