"""Which samples the batch of a rank's first alarm was made of: looked for once, among what its DataLoaders handed out.

    a root returns      its arguments are noted, a large one weakly
    the first alarm     they are compared with the last batches of all loaders (worker/hooks/data_loaders.py)

The loader may be some batches ahead of the model, so that the batch is found by its numbers alone. If what was found
allows two answers, it is not known: never the likelier one.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from typing import Any, NamedTuple

import torch

from ...core.events.alarm_evidence import BatchSource
from ...core.events.run_position import RunPosition
from ...core.recorder.writer import OpenPage
from ...core.signal_errors import from_outside
from ..device.device import without_modes
from ..hooks.data_loaders import DataLoaderHooks
from ..hooks.yielded_batches import TensorPosition, YieldedBatch
from ..record.held_alarms import NonFiniteRow
from ..record.names import inputs_of
from ..record.plain_tensor import is_foreign, version_of
from ..record.progress import RunProgress
from .batch_rows import ENOUGH_BITS, BatchRows, Positions
from .kept_call import WeakLeaf, kept_tensor, still_there

_MOST_NOTED = 4
_MOST_BYTES = 1 << 20
"""A larger tensor that a root was handed is not kept alive."""
_MOST_TENSORS = 16
_MOST_TOLD = 4096
_LIMIT_S = 5.0

_NOT_FOUND = "no batch that a DataLoader has lately handed out has the numbers that the model was handed"
_GONE = "what the model was handed was gone, or changed in place, when the alarm was raised"
_TOO_PLAIN = "what the model was handed has too few different numbers to tell batches apart"
_SEVERAL = "several batches have the numbers that the model was handed"
_APART = "the tensors that the model was handed come from different batches"
_ROWS = "several rows of the batch are equal, so that the part of it that the model was handed has no place in it"
_OTHER_COUNT = "the collate function has returned another number of rows"
_NOT_NOTED = "its sampler gave something else than a list of indices, or the DataLoader is not torch's own"
_CHANGED = "a tensor that the model was handed has other numbers than the batch: its samples may have been mixed"
_NO_NUMBERS = "its sampler gave no integers"
_SLOW = f"to compare the batches took longer than {_LIMIT_S:g} s"


class _HandedInputs(NamedTuple):
    """What a root was handed in one batch."""

    page: int
    tensors: list[tuple[torch.Tensor | WeakLeaf, int]]
    """(the tensor, how often it had been changed in place)"""


class _FoundBatch(NamedTuple):
    """A batch that has the rows, and where."""

    batch: YieldedBatch
    places: Positions
    why: str = ""
    """Why the places are not sure; "" if they are."""


class BatchSources:
    """The one look for the samples of a rank's first alarm."""

    def __init__(self, progress: RunProgress, loaders: DataLoaderHooks) -> None:
        self._progress, self._loaders = progress, loaders
        self._handed: deque[_HandedInputs] = deque(maxlen=_MOST_NOTED)
        self._wanted: tuple[int, RunPosition] | None = None
        """The page of the first alarm, while its forward runs."""
        self._is_told = False

    def root_returned(self, page: OpenPage, args: Any, kwargs: Any) -> None:
        """The forward of a root is over: note what it was handed. Raises nothing of its own."""
        if self._is_told or not self._loaders.batches:
            return
        with self._progress.faults.within("data loaders"):
            # what another module has computed, as for a loss, is no data
            leaves = [leaf for _, leaf in inputs_of(args, kwargs) if isinstance(leaf, torch.Tensor)]
            tensors = [leaf for leaf in leaves if leaf.grad_fn is None][:_MOST_TENSORS]
            handed = _HandedInputs(
                page.number, [(kept_tensor(tensor, _MOST_BYTES), version_of(tensor)) for tensor in tensors]
            )
            self._handed.append(handed)
            if self._wanted is not None and self._wanted[0] == page.number:
                self._tell(self._wanted[1], handed)

    def alarmed(self, bad: NonFiniteRow) -> None:
        """The rank's first alarm: look for its batch, at once or when its forward is over."""
        if self._is_told or not self._loaders.batches:
            return
        where = self._progress.where_of(bad.page, bad.frame)
        handed = next((each for each in self._handed if each.page == bad.page.number), None)
        if handed is not None:
            self._tell(where, handed)
        else:
            self._wanted = bad.page.number, where

    def _tell(self, where: RunPosition, handed: _HandedInputs) -> None:
        self._is_told = True
        self._handed.clear()
        self._progress.recorder.append(without_modes(self._source, where, handed))

    def _source(self, where: RunPosition, handed: _HandedInputs) -> BatchSource:
        found = self._find(handed)
        return BatchSource(where, worker=-2, unknown=found) if isinstance(found, str) else _source_of(where, found)

    # -- the batch ----------------------------------------------------------------------------------------------

    def _find(self, handed: _HandedInputs) -> list[_FoundBatch] | str:
        """The batches that it can have come from, and where in them; else why it is not known."""
        rows, is_gone = [], False
        for kept, version in handed.tensors:
            tensor = still_there(kept)
            if isinstance(tensor, WeakLeaf) or version_of(tensor) != version:
                is_gone = True
            elif _is_plain(tensor):
                rows.append(BatchRows(tensor))
        telling = [each for each in rows if each.bits >= ENOUGH_BITS]
        if not telling:
            return _GONE if is_gone else _TOO_PLAIN
        until = time.monotonic() + _LIMIT_S
        places = [self._places(each, until) for each in telling]
        if time.monotonic() > until:
            return _SLOW
        seen = [each for each in places if each]
        if not seen:
            return _GONE if is_gone else _NOT_FOUND
        same = set.intersection(*seen)
        if not same:
            return _APART
        batches = {id(batch): batch for batch in self._loaders.batches}
        found = [_FoundBatch(batches[batch], where) for batch, where in sorted(same) if batch in batches]
        count = len(found[0].places)
        mixed = any(
            each.count == count and each.is_float and not place for each, place in zip(telling, places, strict=True)
        )
        why = _GONE if is_gone else _CHANGED if mixed else ""
        return [each._replace(why=why) for each in found]

    def _places(self, rows: BatchRows, until: float) -> set[tuple[int, Positions]]:
        """(id of a batch, positions in it) of each batch that has these rows."""
        found: set[tuple[int, Positions]] = set()
        for batch in list(self._loaders.batches):
            for reference, version in zip(batch.tensors, batch.versions, strict=True):
                tensor = reference()
                if tensor is None or version_of(tensor) != version or not _is_plain(tensor):
                    continue
                if time.monotonic() > until:
                    return found
                if _is_one_sample(batch):
                    if rows.is_all_of(tensor) or rows.found_in(tensor):
                        found.add((id(batch), (0,) * rows.count))
                else:
                    found |= {(id(batch), where) for where in rows.found_in(tensor)}
        return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not is_foreign(type(tensor))
        and tensor.device.type != "meta"
        and tensor.dim() > 0
        and 0 < tensor.numel() * tensor.element_size() <= 1 << 28
    )


def _is_one_sample(batch: YieldedBatch) -> bool:
    """Whether the loader hands out samples and no batches: its batch_size is None, and its sampler gives no lists."""
    return not batch.loader.is_batched and not isinstance(batch.index, (list, tuple))


# -- what is told of it -----------------------------------------------------------------------------------------------


def _source_of(where: RunPosition, found: list[_FoundBatch]) -> BatchSource:
    """The one answer that all of the found batches allow."""
    told = [_told_of(where, each) for each in found]
    one = told[0]
    if all(each == one for each in told):
        return one
    if one.indices and all(
        (each.dataset, each.indices, each.keys) == (one.dataset, one.indices, one.keys) for each in told
    ):
        return BatchSource(where, one.dataset, one.indices, one.keys, worker=-2)  # in different epochs
    if len({id(each.batch) for each in found}) > 1:
        return BatchSource(where, worker=-2, unknown=_SEVERAL)
    numbers = found[0].batch.loader.of_data_set(_numbers_of(found[0]) or [])[1]
    return BatchSource(where, one.dataset, [], {}, one.epoch, one.ordinal, one.worker, _ROWS, sorted(numbers))


def _told_of(where: RunPosition, found: _FoundBatch) -> BatchSource:
    batch, places = found.batch, found.places[:_MOST_TOLD]
    loader = batch.loader
    indices: list[int] = []
    among: list[int] = []
    dataset = loader.of_data_set([])[0]
    keys = _keys_of(batch, places) if not found.why else {}
    unknown = found.why or loader.unknown
    given = _given_to(found)
    if not loader.unknown:
        numbers = _numbers_of(found)
        if given is None:
            unknown = _NOT_NOTED
        elif not _is_one_sample(batch) and not unknown:
            unknown = _OTHER_COUNT if _rows_of(batch) != len(given) else loader.in_any_order if len(given) > 1 else ""
        if given is not None and numbers is None:
            shown = [_shown(given[place]) for place in places] if not unknown else [None]
            unknown = unknown or _NO_NUMBERS
            if None not in shown:
                keys = {**keys, "index": [str(each) for each in shown]}
        elif numbers is not None and unknown:
            among = sorted(loader.of_data_set(numbers)[1])[:_MOST_TOLD]
        elif numbers is not None:
            dataset, indices = loader.of_data_set([numbers[place] for place in places])
    order = not loader.in_any_order
    return BatchSource(where, dataset, indices, keys, loader.epoch, batch.ordinal, batch.worker, unknown, among, order)


def _given_to(found: _FoundBatch) -> list[Any] | None:
    """The indices that the batch was made of, as its sampler gave them."""
    index = found.batch.index
    if isinstance(index, (list, tuple)):
        return list(index)
    return [index] if index is not None and _is_one_sample(found.batch) else None


def _numbers_of(found: _FoundBatch) -> list[int] | None:
    """The same as integers; None if one is something else."""
    numbers = [_integer(each) for each in _given_to(found) or [None]]
    return None if None in numbers else [each for each in numbers if each is not None]


def _rows_of(batch: YieldedBatch) -> int | None:
    """The number of rows that all tensors of the batch have; None if they differ, or one is gone."""
    held = [reference() for reference in batch.tensors]
    counts = {len(tensor) if tensor is not None and tensor.dim() else None for tensor in held if tensor is not None}
    return counts.pop() if len(counts) == 1 else None


def _integer(index: Any) -> int | None:
    if isinstance(index, bool):
        return None
    if isinstance(index, int):
        return int(index)
    try:
        return operator.index(index)
    except Exception as error:
        if from_outside(error):
            raise
        return None


def _shown(index: Any) -> str | None:
    """An index that is no integer, as text; None for an object of a class of the script's own."""
    if isinstance(index, tuple):
        parts = [_shown(each) for each in index]
        return f"({', '.join(map(str, parts))})" if None not in parts else None
    return str(index) if type(index) in (str, int, float) else None


def _keys_of(batch: YieldedBatch, places: Positions) -> dict[str, list[str]]:
    """What the batch carries of the samples at these places."""
    found: dict[str, list[str]] = {}
    rows = _rows_of(batch)
    for name, value in batch.keys.items():
        if isinstance(value, TensorPosition):
            tensor = batch.tensors[value.number]()
            is_list = tensor is not None and tensor.dim() == 1 and tensor.numel() <= _MOST_TOLD
            value = tensor.tolist() if tensor is not None and is_list else None
        if _is_one_sample(batch) and isinstance(value, (str, int)):
            value = [value]
        elif not isinstance(value, (list, tuple)) or len(value) != rows:
            continue
        shown = [_shown(each) for each in value[:_MOST_TOLD]]
        if places and max(places) < len(shown) and all(shown[place] is not None for place in places):
            found[name] = [str(shown[place]) for place in places]
    return found
