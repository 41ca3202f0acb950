"""The samples of an alarm's batch, in many ways to set up a DataLoader. An index is right, or it is not told.

The truth is in the numbers: sample i of a data set is drawn with seed i, and the rows that the model was handed are
looked up among all samples.
"""

from __future__ import annotations

import math
import random
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from gpuwatch.core.events.alarm_evidence import BatchSource
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

COUNT, WIDTH, BAD = 48, 6, 29


def sample(index: int) -> torch.Tensor:
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
    x[0] = math.nan if index == BAD else x[0]
    return x


class Pairs(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return sample(index), index % 3


class Records(Pairs):
    def __getitem__(self, index):
        return {"x": sample(index), "path": f"{index}.png", "id": index + 100, "y": index % 3}


class Named(Pairs):
    """Its keys are no integers."""

    def __getitem__(self, key):
        return super().__getitem__(int(key[1:]))


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        step, begin = (worker.num_workers, worker.id) if worker else (1, 0)
        for index in range(begin, COUNT, step):
            yield {"x": sample(index), "__key__": f"k{index}"}


class Sorted(BatchSampler):
    """Writes into the one list that it yields."""

    def __init__(self):
        super().__init__(SequentialSampler(range(COUNT)), 4, False)

    def __iter__(self):
        given = []
        for index in random.Random(3).sample(range(COUNT), COUNT):
            given.append(index)
            if len(given) == 4:
                yield given
                given.clear()


class Rewritten(Sorted):
    """The bad sample is in all of its batches, wherever torch's thread pickles the list."""

    def __iter__(self):
        given = []
        for index in range(8):
            given[:] = [BAD, *random.Random(index).sample(range(BAD), 3)]
            yield given


class Lists(BatchSampler):
    def __iter__(self):
        yield from ([1, 2, 3], [BAD], [5, 8, BAD, 4, 6])


class SortsThem(Pairs):
    """As one whose file wants sorted positions."""

    def __getitems__(self, indices):
        return [self[index] for index in sorted(indices)]


class SortsOwnBatches(Dataset):
    def __getitem__(self, indices):
        return torch.stack([sample(index) for index in sorted(indices)]), 0


def reordered(samples):
    return torch.stack([x for x, _ in reversed(samples)])


def dropped(samples):
    return torch.stack([x for x, _ in samples[1:]])


def user_dict(samples):
    return UserDict(torch.utils.data.default_collate(samples))


def one_late(loader):
    """As accelerate does: the next batch is fetched before the last one is handed on."""
    batches = iter(loader)
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last


def several_ahead(loader, count=5):
    """As Trainer does with gradient accumulation."""
    batches = iter(loader)
    while taken := list(islice(batches, count)):
        yield from taken


def copies(loader):
    """As on a device: the batch itself is dropped."""
    ahead = []
    for batch in loader:
        ahead.append(batch[0].clone())
        del batch
        if len(ahead) == 3:
            yield ahead.pop(0)
    yield from ahead


class SetUp(NamedTuple):
    loader: Callable[[], Any]
    handed: Callable[[Any], Iterator[Any]] = lambda batch: iter([batch[0]])
    """What the model is handed of a batch."""
    unknown: str = ""
    workers: tuple[int, ...] = (0, 1, 2)
    keys: Mapping[str, Callable[[int], str]] = MappingProxyType({})
    batches: Callable[[Any], Any] = iter
    epochs: int = 1


WHOLE = SetUp(lambda n: DataLoader(Pairs(), 4, num_workers=n))
SET_UPS = {
    "in order": WHOLE,
    "shuffled": WHOLE._replace(loader=lambda n: DataLoader(Pairs(), 5, shuffle=True, num_workers=n)),
    "drop_last": WHOLE._replace(loader=lambda n: DataLoader(Pairs(), 7, shuffle=True, drop_last=True, num_workers=n)),
    "last batch": WHOLE._replace(loader=lambda n: DataLoader(Subset(Pairs(), [1, 2, 3, 4, BAD]), 2, num_workers=n)),
    "not in order": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), 4, shuffle=True, num_workers=n, **({"in_order": False} if n else {}))
    ),
    "prefetched far": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), 4, shuffle=True, num_workers=n, prefetch_factor=8), workers=(1, 2)
    ),
    "one sample": WHOLE._replace(loader=lambda n: DataLoader(Pairs(), 1, shuffle=True, num_workers=n)),
    "distributed": WHOLE._replace(
        loader=lambda n: DataLoader(
            Pairs(), 4, sampler=DistributedSampler(Pairs(), 2, BAD % 2, shuffle=False), num_workers=n
        )
    ),
    "with replacement": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), 6, sampler=RandomSampler(range(COUNT), True, 300), num_workers=n)
    ),
    "own batch sampler": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), batch_sampler=Lists(range(9), 1, False), num_workers=n)
    ),
    "a list that is written again": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), batch_sampler=Sorted(), num_workers=n), workers=(0,)
    ),
    "a list that is written again before a worker has it": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), batch_sampler=Rewritten(), num_workers=n),
        workers=(2,),
        unknown="its sampler has changed a list of indices",
    ),
    "no batches": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), batch_size=None, shuffle=True, num_workers=n),
        handed=lambda batch: iter([batch[0][None]]),
    ),
    "batches of the data set": WHOLE._replace(
        loader=lambda n: DataLoader(
            TensorDataset(torch.stack([sample(i) for i in range(COUNT)])),
            batch_size=None,
            sampler=BatchSampler(RandomSampler(range(COUNT)), 5, False),
            num_workers=n,
        )
    ),
    "spawned": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), 4, shuffle=True, num_workers=n, multiprocessing_context="spawn"),
        workers=(2,),
    ),
    "persistent": WHOLE._replace(
        loader=lambda n: DataLoader(Subset(Pairs(), [1, 2, 3, 4]), 2, num_workers=n, persistent_workers=True),
        workers=(1, 2),
        epochs=3,
    ),
    "several epochs": WHOLE._replace(
        loader=lambda n: DataLoader(Subset(Pairs(), range(5)), 2, num_workers=n), epochs=4
    ),
    "records": WHOLE._replace(
        loader=lambda n: DataLoader(Records(), 4, shuffle=True, num_workers=n),
        handed=lambda batch: iter([batch["x"]]),
        keys={"path": "{}.png".format, "id": lambda index: str(index + 100)},
    ),
    "names for indices": WHOLE._replace(
        loader=lambda n: DataLoader(Named(), 4, sampler=[f"s{i}" for i in range(COUNT)], num_workers=n),
        keys={"index": "s{}".format},
        unknown="its sampler gave no integers",
    ),
    "iterable": WHOLE._replace(
        loader=lambda n: DataLoader(Stream(), 4, num_workers=n),
        handed=lambda batch: iter([batch["x"]]),
        keys={"__key__": "k{}".format},
        unknown="an iterable data set gives no indices",
    ),
    "iterable, no batches": WHOLE._replace(
        loader=lambda n: DataLoader(Stream(), batch_size=None, num_workers=n),
        handed=lambda batch: iter([batch["x"][None]]),
        keys={"__key__": "k{}".format},
        unknown="an iterable data set gives no indices",
    ),
    "reordered": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), 4, collate_fn=reordered, num_workers=n),
        handed=lambda batch: iter([batch]),
        unknown="its collate function is not torch's own",
    ),
    "a data set that sorts": WHOLE._replace(
        loader=lambda n: DataLoader(SortsThem(), 4, shuffle=True, num_workers=n),
        unknown="its data set fetches several samples at once",
    ),
    "batches of a data set that sorts": WHOLE._replace(
        loader=lambda n: DataLoader(
            SortsOwnBatches(), None, sampler=BatchSampler(RandomSampler(range(COUNT)), 5, False), num_workers=n
        ),
        unknown="its data set fetches several samples at once",
    ),
    "a sorting data set in parts": WHOLE._replace(
        loader=lambda n: DataLoader(Subset(SortsThem(), range(1, COUNT)), 4, shuffle=True, num_workers=n),
        unknown="its data set fetches several samples at once",
    ),
    "dropped": WHOLE._replace(
        loader=lambda n: DataLoader(Pairs(), 4, collate_fn=dropped, num_workers=n),
        handed=lambda batch: iter([batch]),
        unknown="the collate function has returned another number of rows",
    ),
    "an object around the batch": WHOLE._replace(
        loader=lambda n: DataLoader(Records(), 4, collate_fn=user_dict, num_workers=n),
        handed=lambda batch: iter([batch["x"]]),
        keys={"path": "{}.png".format, "id": lambda index: str(index + 100)},
        unknown="its collate function is not torch's own",
    ),
    "one late": WHOLE._replace(batches=one_late),
    "several ahead": WHOLE._replace(batches=several_ahead),
    "all ahead": WHOLE._replace(batches=lambda loader: iter(list(loader))),
    "copies": WHOLE._replace(batches=copies, handed=lambda batch: iter([batch])),
    "cast": WHOLE._replace(handed=lambda batch: iter([batch[0].bfloat16()])),
    "flattened": WHOLE._replace(handed=lambda batch: iter([batch[0].view(-1, 2, 3)])),
    "first columns": WHOLE._replace(handed=lambda batch: iter([batch[0][:, :-1]])),
    "last columns": WHOLE._replace(handed=lambda batch: iter([batch[0][:, 1:]]), unknown="no nan"),
    "several rows of a sample": WHOLE._replace(handed=lambda batch: iter([batch[0].view(-1, 3)])),
    "micro batches": WHOLE._replace(handed=lambda batch: iter(batch[0].chunk(2))),
    "strided micro batches": WHOLE._replace(handed=lambda batch: iter([batch[0][::2], batch[0][1::2]])),
    "permuted": WHOLE._replace(handed=lambda batch: iter([batch[0][torch.randperm(len(batch[0]))]])),
    "normalized": WHOLE._replace(handed=lambda batch: iter([batch[0] * 2]), unknown="no batch that a DataLoader"),
    "changed in place": WHOLE._replace(handed=lambda batch: iter([batch[0].mul_(2)]), unknown="no batch"),
    "rows changed places": WHOLE._replace(
        handed=lambda batch: iter([batch[0].copy_(batch[0].flip(0))]), unknown="no batch"
    ),
}


def indices_of(handed: torch.Tensor) -> list[int]:
    """The samples that its rows are, by their numbers."""
    rows = handed.detach().reshape(len(handed), -1)
    samples = [sample(index)[: rows.shape[1]].to(rows.dtype) for index in range(COUNT)]
    return [
        next(i for i, each in enumerate(samples) if torch.equal(each.nan_to_num(), row.nan_to_num())) for row in rows
    ]


def train(set_up: SetUp, workers: int) -> tuple[torch.Tensor, int, int, Any]:
    """(what the model was handed in the first batch with nan, epoch and number of that batch, its loader)."""
    loader = set_up.loader(workers)
    found, models = None, {}
    for epoch in range(set_up.epochs):
        for number, batch in enumerate(set_up.batches(loader)):
            for handed in set_up.handed(batch):
                model = models.get(handed.shape[1:]) or models.setdefault(handed.shape[1:], make_model(handed))
                model(handed).float().sum().backward()
                if found is None and handed.isnan().any():
                    found = handed.clone(), epoch, number
                    if set_up.epochs == 1:
                        return *found, loader
    return *(found or (torch.zeros(0), -1, -1)), loader


def make_model(handed: torch.Tensor) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(handed[0].numel(), 2)).to(handed.dtype)


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("name", "workers"), [(name, count) for name, set_up in SET_UPS.items() for count in set_up.workers]
)
def test_the_samples_are_right_or_unknown(watch, name, workers):
    set_up, watched = SET_UPS[name], watch()
    random.seed(0)
    handed, epoch, number, _ = train(set_up, workers)
    assert watched.faults == []
    found = watched.of(BatchSource)
    if set_up.epochs > 1 or set_up.unknown == "no nan":
        assert found == []
        return
    (source,) = found
    if set_up.unknown.startswith("no batch"):
        assert source.indices == []
        assert source.unknown.startswith(set_up.unknown)
        return
    truth = indices_of(handed if name != "several rows of a sample" else handed.view(-1, WIDTH))
    truth = truth if name != "several rows of a sample" else [index for index in truth for _ in range(2)]
    assert BAD in truth
    assert source.unknown.startswith(set_up.unknown) if set_up.unknown else source.unknown == ""
    assert source.indices == ([] if set_up.unknown else truth)
    assert source.keys == {key: [name(index) for index in truth] for key, name in set_up.keys.items()}
    assert set(truth) <= set(source.among or truth)
    assert (source.epoch, source.ordinal) == (epoch, number)
    assert source.worker in range(workers) if workers else source.worker == -1
