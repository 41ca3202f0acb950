"""Counts how often the cause of an overflow is named right: `python -m gpuwatch.tests.causes.benchmark --help`.

Prints a line for each training whose cause was not named, and a table of all.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import re
import statistics
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gpuwatch
import pytest
import torch
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.tests.worker.conftest import use_late_device

from .drawn import DrawnCause, drawn
from .framework_loaders import FRAMEWORKS
from .handed_samples import Draw, LoadedCause
from .loaders import LOADERS

_MOST_LISTED = 16
_TIMES = 5
OUTCOMES = ("right", "less", "wrong", "over-sure", "no overflow")


def verdict_on(train: Callable[[], None], took_s: list[float] | None = None) -> Verdict:
    """The verdict on a training that `gpuwatch.watch` sees.

    What it took to find the operation after the alarm, with all trials, is added to `took_s`, if it was found.
    """
    torch.manual_seed(0)
    watch = gpuwatch.watch()
    with contextlib.suppress(gpuwatch.OverflowDetected), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train()
    verdict = watch.verdict()
    if took_s is not None:
        runs = [rank.second_run for rank in watch._facts().everyone.values()]
        took_s += [run.took_s for run in runs if run is not None and run.operation is not None]
    watch.remove()
    return verdict


def outcome_of(known: DrawnCause, took_s: list[float] | None = None) -> tuple[str, str]:
    """(outcome, what was said)."""
    verdict = verdict_on(known.train, took_s)
    if verdict.kind != "overflow":
        return "no overflow", verdict.statement
    cause = verdict.cause
    if cause is None:
        return ("right" if "" in known.kinds else "less"), verdict.statement
    said = f"{verdict.statement} {cause.line}"
    is_sure = cause.certainty == "established"
    if cause.kind not in known.kinds:
        return ("over-sure" if is_sure else "wrong"), said
    if known.is_between_two and is_sure:
        return "over-sure", said
    if known.says not in cause.statement:
        return ("less" if cause.sample is None else "wrong"), said
    return "right", said


_EACH = re.compile(r"\(index ([\d, ]+)(?:, and \d+ more)?\)$")
_BAD = re.compile(r"index (\d+) of data set")


def outcome_of_loaded(known: LoadedCause, took_s: list[float] | None = None) -> tuple[str, str]:
    """(outcome, what was said). A wrong index is wrong, wherever it stands."""
    verdict = verdict_on(known.train, took_s)
    if not known.kinds or verdict.kind != "overflow":
        is_right = verdict.kind == ("overflow" if known.kinds else "clean")
        return "right" if is_right else "no overflow" if known.kinds else "wrong", verdict.statement
    cause, line = verdict.cause, verdict.cause.line if verdict.cause is not None else ""
    told = [each for text in verdict.evidence for each in _EACH.findall(text)]
    said = " / ".join(filter(None, (verdict.statement, line, *told)))
    assert verdict.batch is not None
    handed = ", ".join(map(str, known.net.rows[verdict.batch][:_MOST_LISTED]))
    named = [int(index) for text in (line, *verdict.next) for index in _BAD.findall(text)]
    if any(each != handed for each in told) or any(index != known.bad for index in named):
        return "wrong", f"{said} / was handed {handed}"
    kind, is_sure = (cause.kind, cause.certainty == "established") if cause is not None else ("", False)
    if kind not in known.kinds:
        return ("less" if not kind else "over-sure" if is_sure else "wrong"), said
    if is_sure and not known.certain:
        return "over-sure", said
    is_all = known.told in (None, bool(told)) and (known.bad is None or bool(named)) and known.says in line
    return ("right" if is_all else "less"), said


@contextlib.contextmanager
def held(on_device: bool) -> Iterator[None]:
    """All tensors are in host memory, or on a device whose numbers arrive late."""
    with pytest.MonkeyPatch.context() as patch:
        use_late_device(patch, LateDevice(3, longest=6) if on_device else None)
        yield


def main() -> int:
    """Run the drawn trainings. Exit code 1 if a cause was wrong or over-sure."""
    parser = argparse.ArgumentParser(description="Counts how often the cause of an overflow is named right.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="1: 150 trainings, or five of each loader")
    parser.add_argument("--loaders", action="store_true", help="trainings whose batches a loader hands out")
    parser.add_argument("--late", action="store_true", help="on a device whose numbers arrive late")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted: Counter[str] = Counter()
    families: dict[str, Counter[str]] = {}
    took_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_STATE_HOME"] = str(Path(folder) / "state")
        for family, name, run in _loaded(options) if options.loaders else _drawn(options):
            with held(options.late):
                outcome, said = run(took_s)
            counted[outcome] += 1
            families.setdefault(family, Counter())[outcome] += 1
            if outcome != "right":
                print(f"{outcome}: {name}: {said}", flush=True)
        os.chdir("/")
    print(
        f"\n| {'loader' if options.loaders else 'best cause'} | {' | '.join(OUTCOMES)} |\n|---|{'---|' * len(OUTCOMES)}"
    )
    for kind, outcomes in families.items():
        print(f"| {kind} | {' | '.join(str(outcomes[each]) for each in OUTCOMES)} |")
    print(f"| all | {' | '.join(str(counted[each]) for each in OUTCOMES)} |")
    if took_s:
        times = f"median {statistics.median(took_s):.3f} s, at most {max(took_s):.2f} s"
        print(f"\nafter the alarm, to find the operation with all trials: {times}, {len(took_s)} runs")
    return 1 if counted["wrong"] or counted["over-sure"] else 0


Trial = tuple[str, str, Callable[[list[float]], tuple[str, str]]]
"""(its line in the table, its name, gives the outcome and what was said, and adds seconds to a list)"""


def _drawn(options: argparse.Namespace) -> Iterator[Trial]:
    for known in drawn(options.seed, options.scale):
        yield known.kinds[0] or "unknown", f"{known.name} ({', '.join(known.kinds)})", partial(outcome_of, known)


def _loaded(options: argparse.Namespace) -> Iterator[Trial]:
    for package, families in {"torch": LOADERS, **FRAMEWORKS}.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: its loaders are left out")
            continue
        for family in families:
            for number in range(max(1, round(options.scale * _TIMES))):
                known = family(Draw(random.Random(f"{options.seed} {family.__name__} {number}")))
                yield package, f"{known.name} ({', '.join(known.kinds)})", partial(outcome_of_loaded, known)


if __name__ == "__main__":
    raise SystemExit(main())
