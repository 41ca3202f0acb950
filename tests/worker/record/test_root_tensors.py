"""Buffers that are not finite before a forward, and hashes of what a root holds, on the host and on a late device."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from gpuwatch.core.events.across_ranks import HashFlag, ReplicaHashes
from gpuwatch.core.events.looked_again import HeldValue
from torch import nn

pytestmark = pytest.mark.quick_here(8)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(1, 0.1, 4), persistent=False)

    def forward(self, x):
        return x * self.inv_freq


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.rotary, self.bn = nn.Linear(4, 4), Rotary(), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("least", torch.full((4,), math.inf))
        self.register_buffer("unused", torch.full((4,), math.nan))

    def forward(self, x):
        return self.bn(self.rotary(self.fc(x)))


@pytest.fixture(params=["host", "late"])
def path(request):
    if request.param == "late":
        request.getfixturevalue("late")
    return request.param


@pytest.fixture
def train(watch, path):
    def run(model, batches, before=lambda model, batch: None, **settings):
        watched = watch(**settings)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        torch.manual_seed(0)
        for batch in range(batches):
            before(model, batch)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        watched.settle()
        assert watched.faults == []
        return watched

    return run


def test_what_is_meant_and_what_nobody_uses_raises_no_alarm(train):
    watched = train(Net(), 12)
    assert watched.anomalies == []
    assert not watched.frames("buffer")


@pytest.mark.parametrize("batch", [0, 3])
def test_a_buffer_that_spoils_a_forward_is_named_with_its_batch(train, batch):
    def spoil(model, now):
        if now == batch:
            model.rotary.inv_freq.fill_(math.nan)

    watched = train(Net(), batch + 2, spoil)
    assert watched.anomalies[0].again.bad_before == [
        HeldValue("", "Net", "unused", "nan"),
        HeldValue("rotary", "Rotary", "inv_freq", "nan"),
    ]
    verdict = watched.verdict()
    assert (verdict.kind, verdict.module, verdict.phase, verdict.role) == (
        "overflow",
        "rotary",
        "buffer",
        "buffer inv_freq",
    )
    assert f"buffer `rotary.inv_freq` was not finite before batch {batch}'s forward (nan)" in verdict.statement


def test_a_buffer_of_another_module_is_not_blamed(train):
    def spoil(model, batch):
        if batch == 2:
            model.fc.weight.data.fill_(3e38)

    verdict = train(Net(), 4, spoil).verdict()
    assert (verdict.kind, verdict.module) == ("overflow", "fc")
    assert verdict.phase != "buffer"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_statistics_of_a_norm_that_are_not_finite_are_an_alarm_by_themselves(train, value):
    """In training its forward does not use them."""

    def spoil(model, batch):
        if batch == 1:
            model.bn.running_var[2] = value

    watched = train(Net(), 24, spoil)
    verdict = watched.verdict()
    assert (verdict.module, verdict.phase, verdict.role) == ("bn", "buffer", "buffer running_var")
    assert verdict.batch in (1, 2, 10, 11), "it changes in every batch, and is looked at in some"


def test_a_rule_of_the_users_covers_a_buffer(train):
    def spoil(model, batch):
        model.bn.running_var[2] = math.inf

    assert train(Net(), 3, spoil, ignore=["bn:buffer running_var"]).anomalies == []


def test_without_weights_nothing_of_a_root_is_read(train, alone_in_a_group):
    assert train(Net(), 3, watch=("forward", "grads")).of(ReplicaHashes) == []


def test_without_a_process_group_there_are_no_replicas_and_no_hashes(train):
    assert train(Net(), 3).of(ReplicaHashes) == []


def test_hashes_are_made_in_few_batches_and_differ_where_the_bits_do(train, alone_in_a_group):
    def change(model, batch):
        if batch == 5:
            model.rotary.inv_freq.data.view(torch.int32)[1] ^= 1
        if batch == 7:
            model.rotary.inv_freq = model.rotary.inv_freq.clone()

    watched = train(Net(), 10, change)
    found = watched.of(ReplicaHashes)
    assert [event.where.batch for event in found] == [0, 1, 2, 4, 8, 9]
    assert [bool(event.tensors) for event in found] == [True, *[False] * 5]
    lines = found[0].tensors
    assert "w fc.weight float32 [4, 4]" in lines
    place = lines.index("b rotary.inv_freq float32 [4]")
    numbers = [int(numpy.frombuffer(event.hashes, "<u4")[place]) for event in found]
    assert len({*numbers[:4]}) == 1
    assert len({*numbers}) == 2
    assert [event.flags[place] for event in found] == [HashFlag.REPLACED, 0, 0, 0, HashFlag.REPLACED, 0]
    weight = lines.index("w fc.weight float32 [4, 4]")
    assert [event.flags[weight] for event in found][1:] == [HashFlag.WRITTEN] * 5


def test_a_hash_tells_constants_apart(train, alone_in_a_group):
    """xor would not: 16 ones and 16 zeros are the same to it."""
    hashes = set()
    for value in (0.0, 1.0, 2.0):
        model = nn.Linear(4, 4)
        model.weight.data.fill_(value)
        hashes.add(train(model, 1).of(ReplicaHashes)[0].hashes[:4])
    assert len(hashes) == 3


def test_shards_and_a_ranks_own_numbers_are_not_hashed(train, alone_in_a_group):
    model = Net()
    model.register_buffer("is_main", torch.ones(1))
    model.register_buffer("counts", torch.ones(4, dtype=torch.int64))
    tensors = train(model, 1).of(ReplicaHashes)[0].tensors
    assert not any("is_main" in line or "counts" in line or "num_batches" in line for line in tensors)

    class FullyShardedDataParallel(nn.Sequential):
        """torch's own needs a group: its name is what counts."""

    tensors = train(FullyShardedDataParallel(Net()), 1).of(ReplicaHashes)[0].tensors
    assert tensors
    assert all(line.startswith("b ") for line in tensors)
