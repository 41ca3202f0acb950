"""What is noted of the batches of a DataLoader: the indices that each was made of, its tensors, and where it came from.

With workers, batches are sent for some steps ahead and may come back in another order. torch numbers what it sends
(`_send_idx`) and forgets a number once its batch is handed out: the number that it has just forgotten is that batch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, StackDataset, Subset

from ...core.signal_errors import from_outside

_ITERABLE = "an iterable data set gives no indices"
_NOT_FOLLOWED = "it is no DataLoader of torch's own, or of a torch that is not known"
_REWRITTEN = "its sampler has changed a list of indices that a worker may not have got yet"
_OWN_COLLATE = "its collate function is not torch's own, and may have changed their order"
_OWN_FETCH = "its data set fetches several samples at once, and may have changed their order"
_LIBRARIES = ("torch.utils.data._utils.collate", "transformers.data.data_collator")
_DATA_SETS = ("torch.utils.data.dataset", "datasets.arrow_dataset")
_UNCHANGING = (int, str, tuple)
_IN_ANY_ORDER = ("DataCollatorWithFlattening", "DataCollatorForPermutationLanguageModeling")


class SentIndices(NamedTuple):
    """Indices that went to a worker."""

    copied: Any
    """None: not known."""
    given: Any
    """The sampler's own object. A thread of torch's pickles it later; None where nobody can change it."""
    worker: int

    @property
    def is_changed(self) -> bool:
        """Whether the sampler has written into it since: the worker may have got either."""
        return self.copied is not None and self.given is not None and _copied(self.given) != self.copied


class TensorPosition(NamedTuple):
    """In the tensors of a batch."""

    number: int


@dataclass(eq=False, slots=True)
class YieldedBatch:
    """One batch that a loader has handed out."""

    loader: LoaderPass
    ordinal: int
    """Its number in the epoch."""
    index: Any
    """What the sampler gave: a list of indices, or one index where batch_size is None."""
    worker: int
    """-1: the process of the rank; -2: not known."""
    tensors: list[weakref.ref[torch.Tensor]]
    versions: list[int]
    """How often each had been changed in place."""
    keys: dict[str, Any]
    """What it carries of its samples: see DataLoaderHooks."""
    held: list[torch.Tensor] = field(default_factory=list)
    """The tensors, for as long as they are held."""
    held_bytes: int = 0


class LoaderPass:
    """One pass of a loader over its data set."""

    def __init__(self, iterator: Any, gone: weakref.ref[Any], epoch: int, followed: bool, room: int) -> None:
        self._gone = gone  # tells its owner that the iterator is gone
        self.epoch, self.room = epoch, room
        self._dataset = _weakly(_unwrapped(iterator._dataset))
        self._name = _name_of(_unwrapped(iterator._dataset))
        self.is_batched = bool(iterator._auto_collation)
        self.unknown = _ITERABLE if iterator._dataset_kind else "" if followed else _NOT_FOLLOWED
        """Why its indices are not known; "" if they are."""
        fetches = "__getitems__" if self.is_batched else "__getitem__"
        self.in_any_order = "" if _fetches_in_order(iterator._dataset, fetches) else _OWN_FETCH
        if not _keeps_order(iterator._collate_fn):
            self.in_any_order = _OWN_COLLATE
        """Why the rows of a batch may be in another order than its indices; "" if they are not."""
        self._copies = type(iterator._index_sampler) is not BatchSampler
        self._has_workers = iterator._num_workers > 0
        self._drawn: list[Any] = []
        self._given: Any = None
        """What the sampler gave last, where it is copied."""
        self._sent: dict[int, SentIndices] = {}
        """By torch's number."""
        self._received: Any = None
        """The indices of the batch that a worker has made and that is handed out next."""
        self._worker = -2 if self._has_workers else -1
        self._handed_out = 0

    def of_data_set(self, indices: list[int]) -> tuple[str, list[int]]:
        """(class of the data set, indices in it): of the script's own, where torch's Subset has chosen from that."""
        dataset, name = self._dataset(), self._name
        while type(dataset) is Subset:
            indices = [int(dataset.indices[index]) for index in indices]
            dataset = dataset.dataset
            name = _name_of(dataset)
        return name, indices

    def draw(self, index: Any) -> None:
        """The sampler has given the indices of a batch."""
        if self.unknown:
            return
        # a sampler of the script's own may write into its list again
        self._drawn.append(_copied(index) if self._copies else index)
        self._given = index if self._copies and type(index) not in _UNCHANGING else None

    def send(self, number: int, worker: int) -> None:
        """They went to a worker."""
        index = self._drawn[0] if len(self._drawn) == 1 else None
        self._drawn.clear()
        self._sent[number] = SentIndices(index, self._given, worker)

    def receive(self, outstanding: Mapping[int, Any], worker: int | None) -> None:
        """A worker's batch is about to be handed out; `outstanding` has what torch still waits for, by number."""
        gone = [number for number in self._sent if number not in outstanding]
        found = [self._sent.pop(number) for number in gone]
        sent = found[0] if len(found) == 1 else SentIndices(None, None, -2)
        self._drawn.clear()
        if sent.is_changed:
            self.unknown = self.unknown or _REWRITTEN
        self._received = sent.copied
        self._worker = worker if worker is not None else sent.worker

    def forget(self) -> None:
        """No batch came of the indices: the pass is over, or a sample was an error."""
        self._drawn.clear()
        self._received = None

    def hand_out(
        self, tensors: list[weakref.ref[torch.Tensor]], versions: list[int], keys: dict[str, Any]
    ) -> YieldedBatch:
        """The script gets a batch."""
        if self._has_workers:
            index, self._received = self._received, None
        else:
            index = self._drawn[0] if len(self._drawn) == 1 else None
            self._drawn.clear()
        batch = YieldedBatch(self, self._handed_out, index, self._worker, tensors, versions, keys)
        self._handed_out += 1
        return batch


def _copied(index: Any) -> Any:
    """The same indices, which nobody changes any more; None if that is not certain."""
    if type(index) in _UNCHANGING:
        return index
    if type(index) is list:
        return index[:]
    if type(index).__module__ == "numpy" and hasattr(index, "tolist"):
        return index.tolist()
    return None


def _weakly(dataset: Any) -> Callable[[], Any]:
    """Gives the data set; None if it is gone, or is of a class without weak references, such as a list."""
    try:
        return weakref.ref(dataset)
    except TypeError as error:
        if from_outside(error):
            raise
        return lambda: None


def _name_of(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


def _unwrapped(dataset: Any) -> Any:
    """The script's own data pipe, where torch has put a wrapper around it."""
    if type(dataset).__name__ in ("_IterDataPipeSerializationWrapper", "_MapDataPipeSerializationWrapper"):
        return getattr(dataset, "_datapipe", dataset)
    return dataset


def _fetches_in_order(dataset: Any, name: str) -> bool:
    """Whether its method of this name, which is asked for several samples, gives them in the order asked for."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    fetch = getattr(type(dataset), name, None)
    if fetch is None:
        return not hasattr(dataset, name) or name == "__getitem__"
    return getattr(fetch, "__module__", "") in _DATA_SETS and type(dataset) is not StackDataset


def _keeps_order(collate: Any) -> bool:
    """Whether row i of what it makes is of the i-th sample."""
    try:
        inner = getattr(collate, "data_collator", collate)  # transformers' RemoveColumnsCollator
        kind = inner if hasattr(inner, "__qualname__") else type(inner)
        return kind.__module__ in _LIBRARIES and kind.__name__ not in _IN_ANY_ORDER
    except Exception as error:  # a class of the script's own may raise whatever it likes
        if from_outside(error):
            raise
        return False
