"""How long after a fault gpuwatch named who was at fault, from the lines that a launch printed and when they came."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

TimedLine = tuple[float, str]
"""(seconds since the epoch, a line of stderr)"""

_OURS = "gpuwatch: "
_REPORT = "VERDICT"
_STATEMENT_LINES = 3
"""The report is wrapped at the terminal's width: the name stands in the first lines of the statement."""
_RANKS = re.compile(r"\b[Rr]anks? (\d+(?:(?:, | and |-)\d+)*)")


def named_after_s(lines: Sequence[TimedLine], fault_s: float, at_fault: set[int]) -> float | None:
    """Seconds from the fault to the first sentence of gpuwatch's own whose first ranks are those at fault, or some.

    None if there is none. An empty `at_fault`: to the verdict, as there is nobody to name.

    >>> named_after_s([(7.0, "gpuwatch: running"), (9.5, "gpuwatch: Rank 1 is at train.py:7")], 4.0, {1})
    5.5
    """
    for when, sentence in _sentences(lines):
        named = _first_ranks(sentence)
        is_told = named <= at_fault and bool(named) if at_fault else sentence.startswith(_REPORT)
        if when >= fault_s and is_told:
            return when - fault_s
    return None


def fault_s(folder: Path) -> float | None:
    """When the first fault of a job came, as its ranks have told (bad_ends.py); None if none has."""
    return min((float(told.read_text()) for told in folder.glob("fault-?")), default=None)


def _sentences(lines: Sequence[TimedLine]) -> Iterable[TimedLine]:
    for at, (when, line) in enumerate(lines):
        if line.startswith(_OURS):
            yield when, line
        elif line.startswith(_REPORT):
            statement = lines[at : at + 1 + _STATEMENT_LINES]
            yield statement[-1][0], " ".join(text.strip() for _, text in statement)


def _first_ranks(sentence: str) -> set[int]:
    """`{0, 1}` for `Ranks 0 and 1 raised`"""
    found = _RANKS.search(sentence)
    ranks: set[int] = set()
    for part in re.split(r", | and ", found[1] if found is not None else ""):
        first, _, last = part.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1)) if first else set()
    return ranks
