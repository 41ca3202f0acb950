"""The script's line in which a value overflowed, cut around the part of it that is the operation.

    `...": x}[name]; a = s.q(h) @ s.k(h).transpose(-2, -1) * 0.5; a = a if ...`

The verdict's evidence has the whole line. The text is cut when it is printed, and the page marks the part.
"""

from __future__ import annotations

from ...core.events.alarm_evidence import BadOperation
from ...core.marked_line import DOTS, MarkedLine, cut_line
from .verdict import Verdict

_AROUND = len("  - ``,")
"""What an item of a list has beside the line."""
_LEAST_WIDTH = 20
_MOST_LINES = 3
"""Lines of a terminal that a long operation takes."""


def evidence_lines(verdict: Verdict, width: int) -> list[str]:
    """The evidence for a terminal of that width, in which the line of the operation is cut to one line.

    An operation that needs more room has up to three lines.
    """
    operation, room = verdict.operation, max(_LEAST_WIDTH, width - _AROUND)
    if operation is None or operation.columns is None:
        return verdict.evidence
    needed = operation.columns[1] - operation.columns[0] + 2 * len(DOTS)
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
