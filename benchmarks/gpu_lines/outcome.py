"""What comes of a line: rows with a figure and pass or fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "told", "skipped"]
"""`told`: a figure without a target. `skipped`: this machine cannot answer it; the note says what it lacks."""


@dataclass(frozen=True)
class Row:
    """One row of the table. `target` says in words from where on it passes."""

    what: str
    verdict: Verdict
    figure: str = ""
    target: str = ""
    note: str = ""


def passed(good: bool) -> Verdict:
    """As a verdict."""
    return "pass" if good else "fail"


def at_most(what: str, value: float, most: float, unit: str = "", note: str = "") -> Row:
    """A row whose figure may not be larger."""
    return Row(what, passed(value <= most), f"{value:.3g}{unit}", f"at most {most:g}{unit}", note)


def first_line(error: BaseException | str) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, str) else f"{type(error).__name__}: "
    return (name + (text[0] if text else ""))[:300]
