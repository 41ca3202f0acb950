"""Tries all rows, and prints the table of docs/frameworks.md: `python tests/frameworks/run.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rows import OVERFLOW, ROWS, Row, run_plainly, run_to_overflow, run_watched


def line(row: Row) -> str:
    if not row.is_installed:
        return f"| {row.name} | `{row.shown}` | not installed here | | | | |"
    with tempfile.TemporaryDirectory() as folder:
        plain = run_plainly(row, Path(folder), 29500)
        watched, clean = run_watched(row, Path(folder), 29500)
        overflowed, found = run_to_overflow(row, Path(folder), 29500)
    cells = [
        row.name,
        f"`{row.shown}`",
        "yes" if watched.losses == plain.losses and plain.losses else "NO",
        "yes" if watched.code == plain.code == 0 and clean["kind"] == "clean" else "NO",
        "yes" if overflowed.code == OVERFLOW and found["rank"] == row.bad else "NO",
        f"`{found['module']}`" if found["module"] == row.module else "NO",
        f"{plain.first_s:.1f} s, {watched.first_s - plain.first_s:+.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("| framework | command | same bits | same exit code, clean | first rank named | module named | first batch |")
    print("|---|---|---|---|---|---|---|")
    for each in ROWS:
        print(line(each), flush=True)
