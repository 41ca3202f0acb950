"""Trainings whose batches come from torch's own DataLoader in its less usual forms, with a known cause each.

Those of frameworks: framework_loaders.py and trainer_loaders.py.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from .handed_samples import COUNT, LARGE, Draw, Handed, Late, LoadedCause, Samples, sample


def fit(net: nn.Module, batches: Iterable[Any], lr: float = 1e-3, every: int = 1) -> None:
    """A step after each `every` batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for number, x in enumerate(batches, 1):
        ((net(x) - 1).square().mean() / every).backward()
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()


class Stream(IterableDataset[Any]):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        step, first = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        for index in range(first, COUNT, step):
            yield {"x": sample(index, self.bad), "__key__": f"shard/{index}"}


def of_a_stream(draw: Draw) -> LoadedCause:
    net, workers = Handed(), draw.draw.choice([0, 1, 2])
    loader = DataLoader(Stream(draw.bad), draw.rows, num_workers=workers, drop_last=True)
    train = lambda: fit(net, (batch["x"] for batch in loader))  # noqa: E731
    name, says = f"a stream of {workers} workers: {draw}", f"(__key__ shard/{draw.bad} of data set "
    return LoadedCause(name, ("data",), train, net, told=False, says=says)


class ByLength(BatchSampler):
    """Batches of different sizes, each in an order of its own. `rewrites`: all in one list."""

    def __init__(self, draw: random.Random, rewrites: bool) -> None:
        super().__init__(range(COUNT), 4, False)
        self.draw, self.rewrites = draw, rewrites

    def __iter__(self) -> Iterator[list[int]]:
        order, given = self.draw.sample(range(COUNT), COUNT), list[int]()
        while order:
            given = given if self.rewrites else []
            given[:] = [order.pop() for _ in range(min(len(order), self.draw.randint(5, 9)))]
            yield given


def of_a_batch_sampler(draw: Draw) -> LoadedCause:
    net, (workers, rewrites) = Handed(), draw.draw.choice([(0, True), (0, False), (2, False)])
    sampler = ByLength(random.Random(draw.seed), rewrites)
    train = lambda: fit(net, DataLoader(Samples(draw.bad), batch_sampler=sampler, num_workers=workers))  # noqa: E731
    name = f"a batch sampler, one list {rewrites}, {workers} workers: {draw}"
    return LoadedCause(name, ("data",), train, net, draw.bad)


class OneListOfAll(BatchSampler):
    """Writes each batch into one list, with the bad sample at another place each time."""

    def __init__(self, bad: int, draw: random.Random) -> None:
        super().__init__(range(COUNT), 4, False)
        self.bad, self.draw = bad, draw

    def __iter__(self) -> Iterator[list[int]]:
        others, given = [index for index in range(COUNT) if index != self.bad], list[int]()
        for _ in range(8):
            given[:] = [*self.draw.sample(others, 7), self.bad]
            self.draw.shuffle(given)
            yield given


def of_a_list_that_is_written_again(draw: Draw) -> LoadedCause:
    """A worker gets what the list holds when torch's thread pickles it: that may be a later batch."""
    net, sampler = Handed(), OneListOfAll(draw.bad, random.Random(draw.seed))
    train = lambda: fit(net, DataLoader(Samples(draw.bad), batch_sampler=sampler, num_workers=2))  # noqa: E731
    return LoadedCause(f"one list, 2 workers: {draw}", ("data",), train, net, told=False)


class SpoiledLater(Samples):
    """Its bad sample is bad the second time that it is asked for: each worker has a copy, and counts for itself."""

    def __init__(self, bad: int) -> None:
        super().__init__(bad)
        self.asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += index == self.bad
        return sample(index, self.bad if self.asked == 2 else -1)


def of_persistent_workers(draw: Draw) -> LoadedCause:
    """One worker keeps its count. The batches of an earlier epoch had the same sample, and it was fine."""
    net = Handed()

    def train() -> None:
        loader = draw.loader(SpoiledLater(draw.bad), num_workers=1, persistent_workers=True)
        fit(net, (x for _ in range(3) for x in loader))

    return LoadedCause(f"persistent workers: {draw}", ("data",), train, net, draw.bad)


def of_accumulation(draw: Draw) -> LoadedCause:
    """A loader's batch is split into parts, of which one has the bad sample."""
    net, parts = Handed(), 2
    loader = DataLoader(Samples(draw.bad), 2 * max(draw.rows, 8), shuffle=True, generator=draw.generator())
    train = lambda: fit(net, (part for x in loader for part in x.chunk(parts)), every=parts)  # noqa: E731
    return LoadedCause(f"a part of a batch: {draw}", ("data",), train, net, draw.bad)


def ahead(loader: Iterable[Any], depth: int) -> Iterator[Any]:
    """A thread fetches batches before they are asked for, as loaders for a GPU do."""
    fetched: queue.Queue[Any] = queue.Queue(depth)
    is_over = threading.Event()

    def put(each: Any) -> bool:
        while not is_over.is_set():
            try:
                fetched.put(each, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def fetch() -> None:
        if all(put(x) for x in loader):
            put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        while (x := fetched.get()) is not None:
            yield x
    finally:
        is_over.set()
        thread.join()


def of_a_prefetching_thread(draw: Draw) -> LoadedCause:
    net, depth = Handed(), draw.draw.choice([1, 3])

    def train() -> None:
        batches = ahead(draw.loader(Samples(draw.bad)), depth)
        try:
            fit(net, batches)
        finally:
            batches.close()  # type: ignore[attr-defined]  # a generator's

    return LoadedCause(f"a thread that fetches {depth} ahead: {draw}", ("data",), train, net, draw.bad)


def of_a_normalising_collate(draw: Draw) -> LoadedCause:
    """It divides by the spread of each batch, and of one batch that is 0: the last has one sample alone. One number is
    left of that, too little to tell which sample it was."""
    net = Handed(torch.tanh)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        x = torch.stack(samples)
        x[:, :-1] = (x[:, :-1] - x[:, :-1].mean(0)) / x[:, :-1].std(0, correction=0)
        return x

    data = Samples(count=draw.rows * 3 + 1)
    train = lambda: fit(net, draw.loader(data, collate_fn=collate))  # noqa: E731
    return LoadedCause(f"a collate function divides by 0: {draw}", ("data",), train, net, told=False, says="holds nan")


def of_nan(draw: Draw) -> LoadedCause:
    """The data set returns nan."""
    net, workers = Handed(torch.tanh), draw.draw.choice([0, 2])

    class WithNan(Samples):
        def __getitem__(self, index: int) -> Any:
            x = sample(index)
            x[1] = x[1] if index != draw.bad else float("nan")
            return x

    train = lambda: fit(net, draw.loader(WithNan(), num_workers=workers))  # noqa: E731
    return LoadedCause(f"nan, {workers} workers: {draw}", ("data",), train, net, draw.bad)


def of_a_whole_batch(draw: Draw) -> LoadedCause:
    """All samples of a batch are as large: no one of them stands out, and a divergence looks the same."""
    net = Handed()
    train = lambda: fit(net, DataLoader(Late(draw.rows * 2, LARGE), draw.rows))  # noqa: E731
    return LoadedCause(f"a whole batch is large: {draw}", ("",), train, net)


def of_large_halves(draw: Draw) -> LoadedCause:
    """Samples grow at once, all alike, and 16 bits do not hold them."""
    net = Handed(lambda h: h.half().float())
    train = lambda: fit(net, DataLoader(Late(draw.rows * 2, 1e7), draw.rows))  # noqa: E731
    return LoadedCause(f"float16 of a loader's batch: {draw}", ("precision",), train, net)


def healthy_with_an_outlier(draw: Draw) -> LoadedCause:
    """One sample is large and harmless. In no batch is anything bad."""
    net = Handed(torch.tanh)
    train = lambda: fit(net, draw.loader(Samples(draw.bad, 1e10)))  # noqa: E731
    return LoadedCause(f"healthy, with an outlier: {draw}", (), train, net)


LOADERS = [
    of_a_stream,
    of_a_batch_sampler,
    of_a_list_that_is_written_again,
    of_persistent_workers,
    of_accumulation,
    of_a_prefetching_thread,
    of_a_normalising_collate,
    of_nan,
    of_a_whole_batch,
    of_large_halves,
    healthy_with_an_outlier,
]
