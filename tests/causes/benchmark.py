"""Counts how often the cause of an overflow is named right: `python -m gpuwatch.tests.causes.benchmark --help`.

Prints a line for each training whose cause was not named, and a table of all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import gpuwatch
import pytest
import torch
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.tests.worker.conftest import use_late_device

from .drawn import DrawnCause, drawn

OUTCOMES = ("right", "less", "wrong", "over-sure", "no overflow")


def verdict_on(train: Callable[[], None]) -> Verdict:
    """The verdict on a training that `gpuwatch.watch` sees."""
    torch.manual_seed(0)
    watch = gpuwatch.watch()
    with contextlib.suppress(gpuwatch.OverflowDetected), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train()
    verdict = watch.verdict()
    watch.remove()
    return verdict


def outcome_of(known: DrawnCause) -> tuple[str, str]:
    """(outcome, what was said)."""
    verdict = verdict_on(known.train)
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
    parser.add_argument("--scale", type=float, default=1.0, help="1: 150 trainings")
    parser.add_argument("--late", action="store_true", help="on a device whose numbers arrive late")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted: Counter[str] = Counter()
    families: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_STATE_HOME"] = str(Path(folder) / "state")
        for known in drawn(options.seed, options.scale):
            with held(options.late):
                outcome, said = outcome_of(known)
            counted[outcome] += 1
            families.setdefault(known.kinds[0] or "unknown", Counter())[outcome] += 1
            if outcome != "right":
                print(f"{outcome}: {known.name} ({', '.join(known.kinds)}): {said}", flush=True)
        os.chdir("/")
    print(f"\n| best cause | {' | '.join(OUTCOMES)} |\n|---|{'---|' * len(OUTCOMES)}")
    for kind, outcomes in families.items():
        print(f"| {kind} | {' | '.join(str(outcomes[each]) for each in OUTCOMES)} |")
    print(f"| all | {' | '.join(str(counted[each]) for each in OUTCOMES)} |")
    return 1 if counted["wrong"] or counted["over-sure"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
