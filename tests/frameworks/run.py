"""Tries all rows, and prints the table of docs/frameworks.md.

python tests/frameworks/run.py [--times 3] [WORD OF A NAME]...
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TypeVar

from rows import HEAD, OVERFLOW, ROWS, SIZES, Row, bad_of, run_plainly, run_to_overflow, run_watched

Found = TypeVar("Found")


def afresh(run: Callable[[Row, int, Path, int], Found], row: Row, ranks: int) -> Found:
    """In a folder of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        return run(row, ranks, Path(folder), port)


def cells(row: Row, times: int) -> Iterator[str]:
    """Run plainly and watched by turns, so that what else the machine does falls on both."""
    yield from (row.name, f"`{row.shown}`")
    if not row.is_installed:
        yield "not installed here"
        return
    ranks = row.sizes[0]
    pairs = [(afresh(run_plainly, row, ranks), *afresh(run_watched, row, ranks)) for _ in range(times)]
    found = {size: afresh(run_to_overflow, row, size) for size in row.sizes}
    losses = pairs[0][0].losses
    yield told(
        len(losses) == 4 * ranks and all(plain.losses == watched.losses == losses for plain, watched, _ in pairs)
    )
    yield told(all(plain.code == watched.code == 0 and clean["kind"] == "clean" for plain, watched, clean in pairs))
    for size in SIZES:
        if size in found:
            outcome, verdict = found[size]
            yield told(outcome.code == OVERFLOW and verdict["rank"] == bad_of(size))
        else:
            yield "-"
    modules = {verdict["module"] for _, verdict in found.values()}
    yield f"`{row.module}`" if modules == {row.module} else f"NO: {modules}"
    for seconds in (attrgetter("first_s"), attrgetter("processors_s")):
        plain_s, watched_s = (median(seconds(pair[which]) for pair in pairs) for which in (0, 1))
        yield f"{plain_s:.1f}, {watched_s:.1f}"


def told(yes: bool) -> str:
    return "yes" if yes else "NO"


def line(words: Iterator[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(words)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="run plainly and watched so often (3); the median is told")
    parser.add_argument("words", nargs="*", help="only rows with one of these in their name")
    args = parser.parse_args()
    print(line(HEAD))
    print("|---" * len(HEAD) + "|")
    for row in ROWS:
        if not args.words or any(word in row.name for word in args.words):
            print(line(tuple(cells(row, args.times))), flush=True)
    print(f"\nload of the last quarter of an hour: {os.getloadavg()[2]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
