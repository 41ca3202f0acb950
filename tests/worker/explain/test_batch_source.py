"""Whether the batch of an alarm is found, and that it is not told where two answers are possible."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuwatch.core.events.alarm_evidence import BatchSource
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from ..hooks.test_data_loaders import BAD, COUNT, Pairs, copies, indices_of, one_late, several_ahead


class Loss(nn.Module):
    def forward(self, x, y):
        return (x.sum(1) - y).square().mean() * math.nan


class Root(nn.Module):
    """Finite; its backward is not."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, x):
        return (self.inner(x) * 0).abs().sqrt()


def meets(watched: Any, batches: Any, model: nn.Module, at: int) -> BatchSource:
    """The source of batch `at`, in which the model's weights are bad."""
    for number, handed in enumerate(batches):
        if number == at:
            with torch.no_grad():
                next(model.parameters()).fill_(math.inf)
        model(*handed) if isinstance(handed, tuple) else model(handed)
    assert watched.faults == []
    (source,) = watched.of(BatchSource)
    return source


def of_numbers(make: Callable[[int], torch.Tensor], count: int = 24) -> TensorDataset:
    return TensorDataset(torch.stack([make(index) for index in range(count)]))


def test_equal_batches_of_other_samples_are_not_told_apart(watch):
    data = of_numbers(lambda index: torch.randn(6, generator=torch.Generator().manual_seed(index % 8)))
    watched = watch()
    source = meets(watched, (x for (x,) in DataLoader(data, 4)), nn.Linear(6, 1), 3)
    assert (source.indices, source.dataset) == ([], "")
    assert source.unknown.startswith("several batches")


def test_the_same_samples_in_several_epochs_are_told_without_the_epoch(watch):
    data = of_numbers(lambda index: torch.randn(6), 4)
    loader = DataLoader(data, 2)
    watched = watch()
    source = meets(watched, (x for _ in range(3) for (x,) in loader), nn.Linear(6, 1), 5)
    assert (source.indices, source.epoch, source.ordinal, source.worker) == ([2, 3], -1, -1, -2)
    assert source.dataset == "torch.utils.data.dataset.TensorDataset"


@pytest.mark.parametrize("make", [lambda _: torch.zeros(6), lambda index: torch.full((6,), index % 2 / 2)])
def test_numbers_that_say_little_are_not_compared(watch, make):
    watched = watch()
    source = meets(watched, (x for (x,) in DataLoader(of_numbers(make), 1)), nn.Linear(6, 1), 3)
    assert source.indices == []
    assert source.unknown.startswith(("what the model was handed has too few", "several"))


def test_a_sample_of_zeros_is_known_by_the_batch_around_it(watch):
    data = of_numbers(lambda index: torch.zeros(6) if index % 3 == 0 else torch.randn(6))
    watched = watch()
    source = meets(watched, (x for (x,) in DataLoader(data, 4)), nn.Linear(6, 1), 2)
    assert source.indices == [8, 9, 10, 11]


def test_rows_that_are_equal_have_no_place(watch):
    row = torch.randn(6)
    watched = watch()
    source = meets(watched, (x[1:3] for (x,) in DataLoader(of_numbers(lambda _: row, 6), 6)), nn.Linear(6, 1), 0)
    assert source.indices == []
    assert source.unknown.startswith("several rows of the batch are equal")
    assert source.among == [0, 1, 2, 3, 4, 5]


def test_a_batch_that_is_too_old_is_not_known(watch):
    watched = watch()
    loader = DataLoader(Pairs(), 1)
    kept = [x.clone() for x, _ in loader]
    source = meets(watched, kept, nn.Linear(6, 1), 3)
    assert source.indices == []
    assert source.unknown.startswith("no batch that a DataLoader")


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, x, y):
        return self.inner(x) + y.float().mean()


def test_tensors_of_two_loaders_are_not_one_batch(watch):
    first, second = (DataLoader(of_numbers(lambda _: torch.randn(6)), 4) for _ in range(2))
    watched = watch()
    source = meets(watched, ((x, y) for (x,), (y,) in zip(first, second, strict=True)), TwoInputs(), 2)
    assert source.indices == []
    assert source.unknown.startswith("the tensors that the model was handed come from different batches")


def test_the_loader_of_the_batch_is_told_and_not_that_of_another(watch):
    first, second = of_numbers(lambda _: torch.randn(6)), Pairs()
    watched = watch()
    pairs = zip(DataLoader(first, 4), DataLoader(second, 4, sampler=RandomSampler(range(24))), strict=True)
    handed, truth = [], None
    for (a,), (b, _) in pairs:
        handed += a, b
        truth = indices_of(b) if len(handed) == 8 else truth
    source = meets(watched, handed, nn.Linear(6, 1), 7)
    assert (source.dataset.rpartition(".")[2], source.indices) == ("Pairs", truth)


def test_samples_that_were_mixed_are_not_told_by_their_labels(watch):
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 1000, (64,)))
    watched = watch()
    batches = ((0.7 * x + 0.3 * x.flip(0), y) for x, y in DataLoader(data, 16))
    source = meets(watched, batches, TwoInputs(), 2)
    assert source.indices == []
    assert source.unknown.startswith("a tensor that the model was handed has other numbers")
    assert source.among == list(range(32, 48))


class Written(Dataset):
    """Writes each sample into the same array."""

    def __init__(self):
        self.array = torch.zeros(4, 6).numpy()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.array[:] = torch.randn(4, 6).numpy()
        return torch.from_numpy(self.array)


def test_an_array_that_is_written_again_for_each_batch(watch):
    watched = watch()
    source = meets(watched, DataLoader(Written(), None), nn.Linear(6, 1), 3)
    assert source.indices == [3] * 4


def test_an_array_that_was_written_again_since(watch):
    watched = watch()
    source = meets(watched, one_late(DataLoader(Written(), None)), nn.Linear(6, 1), 3)
    assert source.indices == []
    assert source.unknown.startswith("several batches")


def test_a_bad_gradient_belongs_to_the_batch_of_its_forward(watch):
    data = of_numbers(lambda _: torch.randn(6))
    watched = watch()
    model, truth = Root(), []
    for number, (x,) in enumerate(one_late(DataLoader(data, 4, shuffle=True))):
        if number == 2:
            truth = [next(i for i in range(len(data)) if torch.equal(data[i][0], row)) for row in x]
        out = model(x.clone())
        (out.sum() if number == 2 else out.detach().sum() * model.inner.bias.sum()).backward()
        if number == 3:
            break
    assert {each.phase for each in watched.anomalies} == {"backward"}
    (source,) = watched.of(BatchSource)
    assert (source.ordinal, source.indices) == (2, truth)


def test_the_loss_is_a_root_of_its_own(watch):
    data = TensorDataset(torch.randn(64, 6), torch.randn(64))
    watched = watch()
    model, loss = nn.Linear(6, 2), Loss()
    for x, y in DataLoader(data, 8):
        loss(model(x), y)
    assert watched.anomalies[0].cls == "Loss"
    (source,) = watched.of(BatchSource)
    assert source.indices == list(range(8))


@pytest.mark.parametrize("batches", [iter, one_late, several_ahead, copies])
def test_numbers_that_come_late(watch, late, batches):
    watched = watch()
    model = nn.Linear(6, 1)
    truth: list[int] = []
    for given in batches(DataLoader(Pairs(), 4, shuffle=True)):
        x = given[0] if isinstance(given, (list, tuple)) else given
        truth = truth or (indices_of(x) if x.isnan().any() else [])
        model(x)
    watched.hooks.settle()
    assert len(watched.anomalies) == 1
    assert [each.indices for each in watched.of(BatchSource)] == [truth]
    assert BAD in truth


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "copied": torch.clone,
    "cast": lambda x: x.to(torch.bfloat16),
    "widened": lambda x: x.double(),
    "split": lambda x: x[len(x) // 2 :],
    "chosen": lambda x: x[torch.randperm(len(x))[: max(1, len(x) - 1)]],
    "part of each": lambda x: x[:, :4],
    "changed": lambda x: x + 1,
    "changed in place": lambda x: x.add_(1),
    "turned": lambda x: x.copy_(x.flip(0)),
    "twice": lambda x: torch.cat([x, x]),
    "rolled": lambda x: x.roll(1, 0),
}


@pytest.mark.quick(12)
@pytest.mark.parametrize("seed", range(60))
def test_an_index_is_right_or_not_told(watch, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    watched = watch()
    change = draw.choice(list(CHANGES))
    data = (
        Pairs()
        if draw.random() < 0.7
        else of_numbers(lambda index: torch.randn(6) if index % 4 else torch.ones(6), COUNT)
    )
    loader = DataLoader(
        data,
        draw.choice([1, 2, 3, 5, 8]),
        sampler=RandomSampler(range(COUNT), replacement=draw.random() < 0.5),
        drop_last=draw.random() < 0.5,
        collate_fn=draw.choice([None, None, lambda samples: torch.utils.data.default_collate(samples[::-1])]),
    )
    ahead = draw.choice([iter, one_late, several_ahead, lambda given: iter(list(given))])
    at, number = draw.randrange(12), 0
    truth: torch.Tensor | None = None
    for _ in range(3):
        for batch in ahead(loader):
            handed = CHANGES[change](batch[0].nan_to_num())
            model = nn.Linear(handed.shape[1], 1).to(handed.dtype)
            if number == at:
                nn.init.constant_(model.weight, math.inf)
                truth = handed.clone()
            model(handed)
            number += 1
    assert watched.faults == []
    (source,) = watched.of(BatchSource)
    assert truth is not None
    for row, index in zip(truth, source.indices, strict=bool(source.indices)):
        assert torch.equal(data[index][0].nan_to_num()[: len(row)].to(row.dtype), row)
