"""What benchmarks of watching share: variants that take turns in one process, and what a recorder holds."""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.frames import Page
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.core.recorder.pages import NameTable, decode_page
from gpuwatch.core.recorder.reader import RecorderReader

V = TypeVar("V")


def in_turns(variants: list[V], rounds: int, run: Callable[[V], None]) -> None:
    """Run every variant once in each round, in a new random order. The garbage collector runs between the rounds."""
    order = random.Random(0)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(rounds):
            gc.collect()
            for one in order.sample(variants, len(variants)):
                run(one)
    finally:
        gc.enable()
        gc.unfreeze()


def interval(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, from the order of the values alone."""
    ordered = sorted(values)
    away = round(0.98 * len(ordered) ** 0.5)
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, round(middle - away))], ordered[min(len(ordered) - 1, round(middle + away))]


def recorder_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder where a launch would keep its recorders: in shared memory, if there is such a place."""
    return tempfile.TemporaryDirectory(
        prefix="gpuwatch-benchmark-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    )


def recorded(path: Path) -> tuple[int, Page | None, list[str]]:
    """(number of pages, the last page, faults of gpuwatch) in a recorder."""
    reader = RecorderReader(path)
    try:
        names = NameTable()
        definitions, events = reader.new_entries()
        names.add(definitions)
        pages = reader[HeadField.PAGE] + 1
        message = reader.page(pages - 1)
    finally:
        reader.close()
    faults = [f"{event.part}: {event.message}" for event in events if isinstance(event, OwnFault)]
    return pages, decode_page(message, names) if message is not None else None, faults
