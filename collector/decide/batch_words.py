"""Which samples a batch was made of, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.events.alarm_evidence import BatchSource

_MOST_SHOWN = 16


def source_line(source: BatchSource, batch: str) -> str:
    """A line of evidence about `batch`, such as `batch 5 of rank 1`.

    >>> from gpuwatch.core.events.run_position import RunPosition
    >>> source_line(BatchSource(RunPosition(1), "data.Images", [7, 3], {}, epoch=0, ordinal=5, worker=1), "batch 5")
    'batch 5 is batch 5 of epoch 0 of its DataLoader, made by worker 1: 2 samples of data set data.Images (index 7, 3)'
    """
    if not source.dataset:
        return f"the samples of {batch} are not known: {source.unknown}"
    place = f"is batch {source.ordinal} of epoch {source.epoch} of its DataLoader" if source.ordinal >= 0 else "holds"
    place += f", made by worker {source.worker}" if source.worker >= 0 else ""
    keys = "".join(f"; {name} {_listed(values)}" for name, values in source.keys.items())
    return f"{batch} {place}: {_samples(source)}{keys}"


def _samples(source: BatchSource) -> str:
    of = f"of data set {source.dataset}"
    if source.indices:
        return f"{_counted(source.indices)} {of} (index {_listed(source.indices)})"
    if source.among:
        which = "which of them is in which row is not known"
        return f"samples {of} among index {_listed(source.among)}; {which}: {source.unknown}"
    return f"samples {of}, whose indices are not known: {source.unknown}"


def _counted(indices: Sequence[int]) -> str:
    count = len(set(indices))
    return f"{count} sample{'s' if count != 1 else ''}"


def _listed(values: Sequence[object]) -> str:
    """The first few; a value that is there throughout once."""
    shown = list(values[:1] if len(set(values)) == 1 else values)
    more = f", and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(map(str, shown[:_MOST_SHOWN])) + more
