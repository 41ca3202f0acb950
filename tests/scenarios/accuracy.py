"""Runs every scenario and writes the places of docs/accuracy.md: `python tests/scenarios/accuracy.py [--jobs N]`.

Each scenario is run in host memory and on a late device. `--from FILE` takes the figures that an earlier run has saved
with `--save FILE`; with `--only WORD` the scenarios of that kind, or with it in their name, are measured anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from runner import LATE_DEVICE, Grade, Outcome, run
from truths import KINDS, Scenario

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
OTHERS = "\n## Causes\n"
"""Where on the page the figures of other scripts begin: tests/causes/benchmark.py, tests/ends/ends.py."""
SEED = "7"
PLACES = ("host memory", "late device")


@dataclass(frozen=True)
class Figure:
    """One run of one scenario, as the page needs it."""

    kind: str
    place: str
    name: str
    grade: str
    over_sure: bool
    false_clean: bool
    false_alarm: bool
    said_established: bool
    """The verdict on a fault said `established`. Clean verdicts have a row of their own."""
    can_be_established: bool
    fault_to_report_s: float | None


def main() -> int:
    """0 if no verdict is wrong, over-sure or falsely clean."""
    parser = argparse.ArgumentParser(description="Runs every scenario and writes docs/accuracy.md.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="scenarios that run at the same time (1)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("--from", dest="saved", type=Path, metavar="FILE", help="read the figures instead of running")
    parser.add_argument(
        "--only",
        metavar="WORD",
        help="with --from: measure the scenarios of this kind, or with this word in their name",
    )
    arguments = parser.parse_args()
    word = arguments.only if arguments.saved else ""
    figures = [Figure(**entry) for entry in json.loads(arguments.saved.read_text())] if arguments.saved else []
    if word is not None:
        new = [figure for place in PLACES for figure in measure(place, arguments.jobs, word)]
        measured = {(figure.place, figure.name) for figure in new}
        figures = [figure for figure in figures if (figure.place, figure.name) not in measured] + new
    if arguments.save:
        arguments.save.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    before = PAGE.read_text()
    others = before[before.index(OTHERS) :]
    PAGE.write_text(page_of(figures) + others)
    for figure in figures:
        if figure.grade != Grade.RIGHT.name:
            print(f"{figure.grade.lower()}: {figure.name} ({figure.place})")
    return int(any(f.grade == Grade.WRONG.name or f.over_sure or f.false_clean for f in figures))


def measure(place: str, jobs: int, word: str) -> list[Figure]:
    """Run the scenarios of this kind, or with this word in their name, in one place."""
    os.environ.pop(LATE_DEVICE, None)
    if place == "late device":
        os.environ[LATE_DEVICE] = SEED
    found = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {
            pool.submit(run, scenario): kind
            for kind, each in KINDS.items()
            for scenario in each
            if word == kind or word in scenario.name
        }
        for number, future in enumerate(as_completed(futures), 1):
            found.append(figure_of(future.result(), futures[future], place))
            print(f"{place}: {number} of {len(futures)}: {found[-1].grade} {found[-1].name}", flush=True)
    os.environ.pop(LATE_DEVICE, None)
    return found


def figure_of(outcome: Outcome, kind: str, place: str) -> Figure:
    """What the page needs of an outcome."""
    return Figure(
        kind,
        place,
        outcome.scenario.name,
        outcome.grade.name,
        outcome.over_sure,
        outcome.is_false_clean,
        outcome.is_false_alarm,
        outcome.certainty == "established" and outcome.kind != "clean",
        outcome.can_be_established,
        outcome.fault_to_report_s,
    )


def page_of(figures: Sequence[Figure]) -> str:
    """docs/accuracy.md."""
    kinds = [kind for kind in KINDS if any(figure.kind == kind for figure in figures)]
    rows = [_row(kind, [figure for figure in figures if figure.kind == kind]) for kind in kinds]
    said = [figure for figure in figures if figure.said_established]
    provable = [figure for figure in figures if figure.can_be_established]
    right = [figure for figure in said if figure.grade == Grade.RIGHT.name and not figure.over_sure]
    proved = [figure for figure in right if figure.can_be_established]
    seconds = sorted(figure.fault_to_report_s for figure in figures if figure.fault_to_report_s is not None)
    table = "\n".join([*rows, _row("**all**", figures)])
    return f"""# Accuracy: how often is the verdict right?

Each scenario is a small training script with one known fault, or with none, and the verdict that follows from the
script. It is run under `gpuwatch launch` twice: with tensors in host memory, and on a stand-in for a device whose
numbers come late. A script made this page from those runs: `python tests/scenarios/accuracy.py`.

| what | runs | right | says less | wrong | over-sure | false clean | false alarm |
|---|---|---|---|---|---|---|---|
{table}

- **Right**: kind, rank, module, phase, role, value and batch are the truth, wherever the truth has them.
- **Says less**: nothing that it names is wrong, and it names less than it could.
- **Wrong**: it names another rank, module or kind. **Over-sure**: it says `established` of what is wrong, or of a
  question that the evidence leaves open.
- **False clean**: it says `clean`, and there was a fault. **False alarm**: there was no fault, and it says something
  else.

| `established`, of faults | |
|---|---|
| verdicts that say it | {len(said)} |
| of these right (precision) | {_share(len(right), len(said))} |
| faults that a run's evidence can prove | {len(provable)} |
| of these reported right and as established (recall) | {_share(len(proved), len(provable))} |

| from the fault to the report, in seconds | |
|---|---|
| runs | {len(seconds)} |
| median | {_at(seconds, 0.5)} |
| 99th percentile | {_at(seconds, 0.99)} |

The report waits for the ranks to end, so most of that time is torchrun stopping them. What watching costs a step:
[cost.md](cost.md).

What the same checks say of sixty architectures that nobody here wrote: [architectures.md](architectures.md). What
gpuwatch cannot tell: [limits.md](limits.md).

The scenarios with an honest answer of `supported` or `unknown`: {_open(figures)}. Their scripts and truths are in
`tests/scenarios`. CI runs a sample of them, and `make soak` runs all. This page is of {date.today().isoformat()}, torch
{torch.__version__.partition("+")[0]}, two CPU cores.
"""


def _row(name: str, figures: Iterable[Figure]) -> str:
    chosen = list(figures)
    grades = [
        sum(figure.grade == grade.name for figure in chosen) for grade in (Grade.RIGHT, Grade.UNKNOWN, Grade.WRONG)
    ]
    flags = [sum(getattr(f, flag) for f in chosen) for flag in ("over_sure", "false_clean", "false_alarm")]
    return f"| {name} | {' | '.join(map(str, [len(chosen), *grades, *flags]))} |"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "none"


def _at(ordered: Sequence[float], share: float) -> str:
    """The smallest value that this share of the values does not exceed."""
    return f"{ordered[max(0, math.ceil(share * len(ordered)) - 1)]:.1f}" if ordered else "none"


def _open(figures: Sequence[Figure]) -> str:
    names = {scenario.name for scenarios in KINDS.values() for scenario in scenarios if _is_open(scenario)}
    return f"{len(names & {figure.name for figure in figures})} of {len({figure.name for figure in figures})}"


def _is_open(scenario: Scenario) -> bool:
    return scenario.verdict.get("certainty") in ("supported", "unknown")


if __name__ == "__main__":
    sys.exit(main())
