"""Tries all rows, and prints the table of docs/frameworks.md: `python tests/frameworks/run.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rows import OVERFLOW, ROWS, Row, try_row


def line(row: Row) -> str:
    if not row.is_installed:
        return f"| {row.name} | `{row.shown}` | not installed here | | | | |"
    with tempfile.TemporaryDirectory() as folder:
        trial = try_row(row, Path(folder), 29500)
    found = trial.overflow
    cells = [
        row.name,
        f"`{row.shown}`",
        "yes" if trial.watched.losses == trial.plain.losses and trial.plain.losses else "NO",
        "yes" if trial.watched.code == trial.plain.code == 0 and trial.clean["kind"] == "clean" else "NO",
        "yes" if trial.overflowed.code == OVERFLOW and found["rank"] == row.bad else "NO",
        f"`{found['module']}`" if found["module"] == row.module else "NO",
        f"{trial.plain.first_s:.1f} s, {trial.watched.first_s - trial.plain.first_s:+.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("| framework | command | same bits | same exit code, clean | first rank named | module named | first batch |")
    print("|---|---|---|---|---|---|---|")
    for each in ROWS:
        print(line(each), flush=True)
