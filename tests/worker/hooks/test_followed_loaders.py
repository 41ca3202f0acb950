"""Following DataLoaders changes nothing for the script, and keeps nothing that it should not."""

from __future__ import annotations

import gc
import math
import pickle
import random
import signal
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from gpuwatch.core.events.alarm_evidence import BatchSource
from gpuwatch.worker.hooks import data_loaders
from gpuwatch.worker.patches import replaced
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .test_data_loaders import COUNT, Pairs, Records, Stream


class Drawn(Dataset):
    """Its samples depend on all the random numbers of its process."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(3), random.random(), np.random.rand(), index


class Large(Dataset):
    def __init__(self, numbers: int):
        self.numbers = numbers

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((self.numbers,), float(index))


class OfAnArray(IterableDataset):
    """Hands out parts of one array."""

    def __init__(self):
        self.array = np.arange(4000, dtype=np.float32).reshape(8, 500)

    def __iter__(self):
        yield from (torch.from_numpy(row) for row in self.array)


LOADERS = {
    "alone": lambda: DataLoader(Drawn(), 3, shuffle=True),
    "forked": lambda: DataLoader(Drawn(), 3, shuffle=True, num_workers=2),
    "spawned": lambda: DataLoader(Drawn(), 3, shuffle=True, num_workers=2, multiprocessing_context="spawn"),
    "persistent": lambda: DataLoader(Drawn(), 3, shuffle=True, num_workers=2, persistent_workers=True),
    "no batches": lambda: DataLoader(Drawn(), None, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), 5, num_workers=2),
    "records": lambda: DataLoader(Records(), 5, drop_last=True),
}


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def numbers(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.numpy().tobytes(), batch.dtype, batch.is_shared()
    if isinstance(batch, dict):
        return {key: numbers(value) for key, value in batch.items()}
    return [numbers(each) for each in batch] if isinstance(batch, list) else batch


def two_epochs(name: str) -> Any:
    seed()
    loader = LOADERS[name]()
    found = [numbers(batch) for _ in range(2) for batch in loader]
    return found, torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


SPAWNED = pytest.param("spawned", marks=[pytest.mark.slow, pytest.mark.sample(1, of="spawned workers")])
"""torch is imported in each worker."""


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [SPAWNED if name == "spawned" else name for name in LOADERS])
def test_batches_their_order_and_random_numbers_are_as_without(watch, name):
    before = two_epochs(name)
    watched = watch()
    assert two_epochs(name) == before
    watched.hooks.detach()
    assert two_epochs(name) == before
    assert watched.faults == []


def test_a_loader_is_as_it_was_and_pickled_as_before(watch):
    loader = DataLoader(Pairs(), 4)
    before, names = pickle.dumps(loader), set(vars(loader))
    watched = watch()
    batches = iter(loader)
    next(batches)
    assert set(vars(loader)) == names
    assert pickle.dumps(loader) == before
    assert len(list(pickle.loads(before))) == COUNT / 4
    watched.hooks.detach()
    assert len(list(batches)) == COUNT / 4 - 1, "an iterator goes on when the hooks have gone"


class Fails(Pairs):
    def __getitem__(self, index):
        if index == 5:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_data_set_raises_comes_as_it_is_and_the_loader_goes_on(watch, workers):
    data = Fails()
    data.error = LookupError("sample 5")
    watched = watch()
    batches = iter(DataLoader(data, 4, num_workers=workers))
    next(batches)
    with pytest.raises(LookupError, match="sample 5"):
        next(batches)
    assert next(batches)[1].tolist() == [index % 3 for index in range(8, 12)]
    assert [each.index for each in watched.hooks._loaders.batches] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    list(batches)  # else torch waits for the workers
    assert watched.faults == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_data_set_is_the_scripts(watch, error):
    data = Fails()
    data.error = error
    watched = watch()
    with pytest.raises(error):
        list(DataLoader(data, 4))
    assert watched.faults == []


class Interrupting(dict):
    """A batch while which is noted a signal comes."""

    @property
    def __class__(self):
        signal.raise_signal(signal.SIGUSR1)
        return dict


def interrupts(number: int, frame: Any) -> None:
    raise ValueError("of a handler")


def test_what_a_signals_handler_raises_is_the_scripts(watch):
    watched = watch()
    before = signal.signal(signal.SIGUSR1, interrupts)
    try:
        with pytest.raises(ValueError, match="of a handler"):
            list(DataLoader(Pairs(), 4, collate_fn=as_interrupting))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert watched.faults == []


def as_interrupting(samples):
    return Interrupting(x=1)


def test_an_error_of_our_own_is_recorded_once_and_the_loader_goes_on(watch, monkeypatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(data_loaders, "_collect", fails)
    watched = watch()
    assert len(list(DataLoader(Pairs(), 1))) == COUNT
    assert [(fault.part, fault.message) for fault in watched.faults] == [("data loaders", "RuntimeError: ours")]
    assert not watched.hooks._loaders.batches


FOLLOWED: list[Any] = []


class OfAWorker(Dataset):
    """What a forked worker has of the hooks."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return len(FOLLOWED[0].batches), len(replaced())


def test_a_forked_worker_has_no_hooks_and_frees_nothing_of_its_parents(watch):
    watched = watch()
    FOLLOWED[:] = [watched.hooks._loaders]
    batches = iter(DataLoader(Pairs(), 4))
    next(batches)
    next(batches)
    (found,) = DataLoader(OfAWorker(), None, num_workers=1, multiprocessing_context="fork")
    assert tuple(found) == (2, 0)
    FOLLOWED.clear()


# -- what is held -----------------------------------------------------------------------------------------------------


def held(watched: Any) -> list[int]:
    """Ordinals of the batches whose tensors are alive."""
    gc.collect()
    return [each.ordinal for each in watched.hooks._loaders.batches if all(ref() is not None for ref in each.tensors)]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_four_batches_are_held(watch, workers):
    watched = watch()
    for _ in DataLoader(Pairs(), 4, num_workers=workers):
        pass
    assert held(watched)[:-1] == [8, 9, 10], "and the last, which the loop has"
    watched.hooks.detach()
    assert not watched.hooks._loaders.batches


@pytest.mark.quick(1)
@pytest.mark.parametrize(("mebibytes", "count"), [(15, 4), (20, 3), (60, 1), (70, 0)])
def test_no_more_than_64_mib_are_held(watch, mebibytes, count):
    watched = watch()
    loader = DataLoader(Large(mebibytes << 18), 1)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    assert held(watched) == list(range(5 - count, 5))


def test_a_part_of_an_array_is_not_held(watch):
    watched = watch()
    batches = iter(DataLoader(OfAnArray(), None))
    for _ in range(5):
        next(batches)
    assert held(watched) == []


def test_loader_data_set_and_iterator_are_not_kept(watch):
    watched = watch()
    loader = DataLoader(Pairs(), 4)
    batches = iter(loader)
    next(batches)
    kept = [weakref.ref(each) for each in (loader, loader.dataset, batches)]
    del loader, batches
    gc.collect()
    assert [each() for each in kept] == [None] * 3
    assert watched.hooks._loaders._passes == watched.hooks._loaders._begun == {}


def test_a_tensor_that_a_model_was_handed_is_not_kept_if_it_is_large(watch):
    watched = watch()
    model = nn.Linear(1, 1)
    next(iter(DataLoader(Pairs(), 4)))
    large, small = torch.zeros(1 << 20, 1), torch.zeros(4, 1)
    kept = [weakref.ref(large), weakref.ref(small)]
    with torch.no_grad():
        model(large)
        model(small)
    del large, small
    gc.collect()
    assert [each() is not None for each in kept] == [False, True]
    assert watched.faults == []


def test_a_model_without_a_loader_has_no_source(watch):
    watched = watch()
    nn.Linear(2, 1)(torch.full((3, 2), math.nan))
    assert watched.of(BatchSource) == []
