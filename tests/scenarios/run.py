"""Runs the scenarios and prints the score: `python tests/scenarios/run.py [--only NAME] [--jobs N] [--plain]`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from runner import Grade, Outcome, run, run_plain
from truths import SCENARIOS, Scenario

COLOURS = {Grade.RIGHT: "green", Grade.UNKNOWN: "yellow", Grade.WRONG: "red"}


def main() -> int:
    """0 when every verdict is right."""
    parser = argparse.ArgumentParser(description="Compares gpuwatch's verdicts with the truth.")
    parser.add_argument("--only", action="append", metavar="NAME", help="scenarios or scripts that contain this word")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time (1)")
    parser.add_argument("--plain", action="store_true", help="check the scenarios themselves, without gpuwatch")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the output of those that are not right")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    words = arguments.only or [""]
    chosen = [s for s in SCENARIOS if any(word in s.name or word in s.script for word in words)]
    if not chosen:
        parser.error(f"no scenario has {' or '.join(words)} in its name; see --list")
    if arguments.list:
        print(*(scenario.name for scenario in chosen), sep="\n")
        return 0
    console = Console(width=None if sys.stdout.isatty() else 200)
    outcomes = _run_all(chosen, arguments.jobs, arguments.plain, console)
    console.print(_table(outcomes))
    if arguments.verbose:
        for outcome in outcomes:
            if outcome.grade is not Grade.RIGHT:
                console.rule(escape(outcome.scenario.name))
                console.print(escape(outcome.log), highlight=False)
    _print_score(outcomes, console)
    return 0 if all(outcome.grade is Grade.RIGHT for outcome in outcomes) else 1


def _run_all(chosen: list[Scenario], jobs: int, plain: bool, console: Console) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, Outcome] = {}
    with Progress(*columns, console=console, transient=True) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("scenarios", total=len(chosen))
        futures = [pool.submit(run_plain if plain else run, scenario) for scenario in chosen]
        try:
            for future in as_completed(futures):
                outcome = future.result()
                found[outcome.scenario.name] = outcome
                progress.console.print(_line(outcome), highlight=False)
                progress.advance(task)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return [found[scenario.name] for scenario in chosen]


def _line(outcome: Outcome) -> str:
    colour, name = COLOURS[outcome.grade], outcome.grade.name.lower()
    return f"[{colour}]{name:8}[/] {outcome.seconds:5.1f} s  {escape(outcome.scenario.name)}"


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(show_lines=True)
    for heading in ("scenario", "expected", "found", "s", "verdict"):
        table.add_column(heading)
    for outcome in outcomes:
        colour = COLOURS[outcome.grade]
        found = "\n".join([outcome.found, *(f"- {difference}" for difference in outcome.differences)])
        table.add_row(
            escape(outcome.scenario.name),
            escape(outcome.expected),
            escape(found),
            f"{outcome.seconds:.1f}",
            f"[{colour}]{outcome.grade.name.lower()}[/]",
        )
    return table


def _print_score(outcomes: list[Outcome], console: Console) -> None:
    grades = Counter(outcome.grade for outcome in outcomes)
    points = sum(grade.value * count for grade, count in grades.items())
    seconds = sum(outcome.seconds for outcome in outcomes)
    console.print(
        f"verdicts right / all: {grades[Grade.RIGHT]} / {len(outcomes)}, "
        f"{grades[Grade.UNKNOWN]} say too little, {grades[Grade.WRONG]} wrong, "
        f"{sum(outcome.over_sure for outcome in outcomes)} over-sure; "
        f"{points} points of {len(outcomes)} (right 1, too little 0, wrong -2); {seconds:.0f} s of runs",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
