"""torch's DataLoaders: which indices each batch was made of, so that an alarm can tell the samples of its batch.

Indices, samples and tensors are noted by reference; nothing is read here. What a batch holds is compared once, after
the first alarm (worker/explain/batch_source.py). A loader is not changed: it is pickled to its workers as before.

A script may hand on a copy of a batch, on a device or of another dtype, and drop the batch itself. So the last batches
are held for a while: at most four, 64 tensors and 64 MiB, of memory that is theirs alone. A batch that a worker has
sent is in shared memory, and each of its tensors has a descriptor: of that, a sixteenth of what is free is held.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import torch

from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from ..patches import PatchLedger
from ..record.plain_tensor import version_of
from ..record.progress import FaultGuard, FaultRecorder
from .yielded_batches import LoaderPass, TensorPosition, YieldedBatch

_PART = "data loaders"
_LOADERS = "torch.utils.data.dataloader"
_BASE, _SINGLE, _SEVERAL = "_BaseDataLoaderIter", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"
_WANTED = [f"{_LOADERS}.{_BASE}.{name}" for name in ("__init__", "__next__", "_next_index", "_reset")]
_WANTED += [f"{_LOADERS}.{_SEVERAL}.{name}" for name in ("_try_put_index", "_process_data")]
_WANTED.append(f"{_LOADERS}.{_SINGLE}._next_data")
_MOST_NOTED = 32
"""Batches: of most of them nothing is left but the indices."""
_MOST_HELD, _MOST_HELD_TENSORS, _MOST_HELD_BYTES = 4, 64, 64 << 20
_MOST_TENSORS = 32
_MOST_DEPTH = 3
_KEYS = frozenset(("__key__", "id", "idx", "index", "path", "file", "url"))
_TENSOR = torch.Tensor
_SHARED_MEMORY = "/dev/shm"  # where Linux has it; nothing is written there


class DataLoaderHooks:
    """Follows all DataLoaders of a rank. `attach()` replaces functions of torch's, and the ledger restores them."""

    def __init__(self, faults: FaultRecorder) -> None:
        self._faults = faults
        self._guard = FaultGuard(self._failed, _PART)
        self._is_on = True
        """Until an error of its own: one in each batch would have all hooks removed (FaultRecorder)."""
        self.batches: deque[YieldedBatch] = deque(maxlen=_MOST_NOTED)
        """The last that loaders have handed out, the latest last."""
        self._held: deque[YieldedBatch] = deque()
        self._passes: dict[int, LoaderPass] = {}
        """By the id of a loader's iterator, while that lives."""
        self._begun: dict[int, tuple[weakref.ref[Any], int]] = {}
        """id of a loader -> the loader, and how often it was iterated. It may have an `__eq__` of the script's own."""
        self._exact: tuple[Any, Any] = (None, None)
        """torch's own classes of iterators: without workers, and with."""

    def attach(self, patches: PatchLedger) -> None:
        """Replace the functions. Does nothing where this torch has other ones."""
        if any(name_in_torch(path) is None for path in _WANTED):
            return
        loaders = sys.modules[_LOADERS]
        base, single, several = (vars(loaders)[name] for name in (_BASE, _SINGLE, _SEVERAL))
        self._exact = single, several
        patches.replace(base, "__init__", self._around_init)
        patches.replace(base, "_reset", self._around_reset)
        patches.replace(base, "_next_index", self._around_next_index)
        patches.replace(base, "__next__", self._around_next)
        patches.replace(several, "_try_put_index", self._around_try_put_index)
        patches.replace(several, "_process_data", self._around_process_data)
        process = os.getpid()

        def release() -> None:
            # in a forked child the tensors stay: pinned memory cannot be freed there, which would ask the device
            if os.getpid() == process:
                self._let_go()

        patches.at_undo(release)

    def _failed(self, part: str, error: Exception) -> None:
        self._is_on = False
        self._let_go()
        self._faults.record(part, error)

    def _let_go(self) -> None:
        self.batches.clear()
        self._held.clear()
        self._passes.clear()

    # -- in place of torch's functions --------------------------------------------------------------------------

    # All of them call torch's own outside of the guard: what that raises is the script's.

    def _around_init(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def init(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            before(iterator, loader, *args, **kwargs)
            with self._guard:
                self._begins(iterator, loader)

        return init

    def _around_reset(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            before(iterator, loader, first_iter)
            if not first_iter:  # workers that persist begin another epoch
                with self._guard:
                    self._begins(iterator, loader)

        return reset

    def _around_next_index(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def next_index(iterator: Any) -> Any:
            index = before(iterator)
            with self._guard:
                loader = self._passes.get(id(iterator))
                if loader is not None:
                    loader.draw(index)
            return index

        return next_index

    def _around_try_put_index(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def try_put_index(iterator: Any) -> None:
            sent = iterator._send_idx
            before(iterator)
            with self._guard:
                loader = self._passes.get(id(iterator))
                if loader is not None and iterator._send_idx == sent + 1:
                    loader.send(sent, iterator._task_info[sent][0])

        return try_put_index

    def _around_process_data(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def process_data(iterator: Any, data: Any, *worker: Any) -> Any:
            with self._guard:
                loader = self._passes.get(id(iterator))
                if loader is not None:
                    loader.receive(iterator._task_info, worker[0] if worker else None)
            return before(iterator, data, *worker)

        return process_data

    def _around_next(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def __next__(iterator: Any) -> Any:
            try:
                batch = before(iterator)
            except BaseException:
                with self._guard:
                    loader = self._passes.get(id(iterator))
                    if loader is not None:
                        loader.forget()
                raise
            with self._guard:
                loader = self._passes.get(id(iterator))
                if loader is not None:
                    self._note(loader, batch)
            return batch

        return __next__

    # -- what is noted ------------------------------------------------------------------------------------------

    def _begins(self, iterator: Any, loader: Any) -> None:
        if not self._is_on:
            return
        key = id(loader)
        known, begun = self._begun.get(key) or (weakref.ref(loader, lambda _: self._begun.pop(key, None)), 0)
        self._begun[key] = known, begun + 1
        followed, number = type(iterator) in self._exact, id(iterator)
        gone = weakref.ref(iterator, lambda _: self._passes.pop(number, None))
        self._passes[number] = LoaderPass(iterator, gone, begun, followed, _room(iterator._num_workers))

    def _note(self, loader: LoaderPass, batch: Any) -> None:
        tensors: list[torch.Tensor] = []
        keys: dict[str, Any] = {}
        _collect(batch, tensors, keys, 0)
        references = [weakref.ref(tensor) for tensor in tensors]
        noted = loader.hand_out(references, [version_of(tensor) for tensor in tensors], keys)
        self.batches.append(noted)
        self._hold(noted, tensors, loader.room)

    def _hold(self, noted: YieldedBatch, tensors: list[torch.Tensor], room: int) -> None:
        size = 0
        for tensor in tensors:
            cost = _held_bytes(tensor)
            if cost is None or size + cost > room:
                return
            size += cost
        held = self._held
        noted.held, noted.held_bytes = tensors, size
        held.append(noted)
        count, size = len(noted.held), size
        for position in range(len(held) - 2, -1, -1):
            each = held[position]
            count, size = count + len(each.held), size + each.held_bytes
            if len(held) - position > _MOST_HELD or count > _MOST_HELD_TENSORS or size > room:
                for _ in range(position + 1):
                    held.popleft().held = []
                return


def _room(workers: int) -> int:
    """How many bytes may be held of a loader's batches."""
    if not workers:
        return _MOST_HELD_BYTES
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError as error:  # not on Linux
        if from_outside(error):
            raise
        return _MOST_HELD_BYTES >> 4
    return min(_MOST_HELD_BYTES, found.f_bavail * found.f_frsize >> 4)


def _held_bytes(tensor: torch.Tensor) -> int | None:
    """How much memory it keeps; None if that is not known, or it is on a device: then it is not held.

    One that torch.from_numpy has made keeps an array, which may be a small part of a large one.
    """
    if type(tensor) is not _TENSOR or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.requires_grad:
        return None
    storage = tensor.untyped_storage()
    return storage.nbytes() if storage.resizable() or storage.is_shared() else None


def _collect(part: Any, tensors: list[torch.Tensor], keys: dict[str, Any], depth: int) -> None:
    """The tensors of a batch, and what it carries of its samples' names (_KEYS): a list, or a position in `tensors`.

    Calls nothing of the script's own.
    """
    if isinstance(part, _TENSOR):
        if len(tensors) < _MOST_TENSORS:
            tensors.append(part)
    elif depth == _MOST_DEPTH:
        return
    elif isinstance(part, (tuple, list)):
        if len(part) <= _MOST_TENSORS and type(part[0] if part else "") is not str:
            for value in part:
                _collect(value, tensors, keys, depth + 1)
    elif isinstance(part, dict):
        for key, value in dict.items(part):
            if type(key) is str and key in _KEYS:
                if isinstance(value, (list, tuple, str, int)):
                    keys.setdefault(key, value)
                elif isinstance(value, _TENSOR) and len(tensors) < _MOST_TENSORS:
                    keys.setdefault(key, TensorPosition(len(tensors)))
            _collect(value, tensors, keys, depth + 1)
    elif UserDict in type(part).__mro__:
        _collect(part.data, tensors, keys, depth)
