"""Which module's backward made the first bad gradient, where several have used the same tensor.

In each, `fault` is a module whose forward is finite and whose backward makes nan at a row of zeros.
"""

from __future__ import annotations

import gpuwatch
import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZE = 8


class Fault(nn.Module):
    """Each row times its own length. Of a row of zeros the gradient is 0 * inf."""

    def forward(self, x):
        return x * x.square().sum(-1, keepdim=True).sqrt()


def diagonal() -> nn.Linear:
    linear = nn.Linear(SIZE, SIZE, bias=False)
    nn.init.eye_(linear.weight)
    return linear


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fault = Fault()
        self.first, self.second, self.third = diagonal(), diagonal(), diagonal()


class PreNorm(Block):
    def forward(self, x):
        return x + self.first(self.fault(x))


class PostNorm(Block):
    def forward(self, x):
        return self.fault(x + self.first(x))


class Parallel(Block):
    """As GPT-J and Falcon: attention and feed-forward next to each other, of one norm."""

    def forward(self, x):
        normed = self.fault(x)
        return x + self.first(normed) + self.second(normed)


class Gated(Block):
    def forward(self, x):
        return self.third(self.fault(self.first(x)) * self.second(x))


class GateItself(Block):
    """The gate is a module of its own that shares its input with a matrix product."""

    def forward(self, x):
        return self.third(self.fault(x) * self.second(x))


class Attention(Block):
    """`q`, `k` and `v` share their input; `k` is the fault."""

    def forward(self, x):
        q, k, v = self.first(x), self.fault(x), self.third(x)
        return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


class ScaledFirst(Block):
    """Own code multiplies before the fault: nobody has seen the gradient in between."""

    def forward(self, x):
        return x + self.first(self.fault(x * 2.0) + x)


class Product(Block):
    """Own code multiplies what modules have returned: out of finite numbers that makes no nan."""

    def forward(self, x):
        return x * self.fault(x)


class Two(Block):
    """A whole decoder layer: nobody has seen the gradient between the two residual sums, but that of `first`, which
    the first sum has made, too."""

    def forward(self, x):
        x = x + self.first(self.fault(x))
        return x + self.third(torch.nn.functional.silu(self.second(x)))


class Down(Block):
    """The end of a gated feed-forward."""

    def forward(self, x):
        return self.fault(self.first(x) * self.second(x))


class Exponential(Block):
    """Own code computes on what it hands to the fault: both can have made it."""

    def forward(self, x):
        return x.exp() * self.fault(x)


class TwoFaults(Block):
    def __init__(self):
        super().__init__()
        self.other = Fault()

    def forward(self, x):
        return self.fault(x) + self.other(x)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module], how: str = "plain"):
        super().__init__()
        self.embed = diagonal()
        self.block = block()
        self.head = nn.Linear(SIZE, 1)
        self.how = how

    def forward(self, x):
        hidden = self.embed(x)
        if self.how == "plain":
            hidden = self.block(hidden)
        else:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.how == "reentrant")
        return self.head(hidden)


def verdict_of(model, inputs, loss=lambda y: y.square().mean(), **settings):
    with gpuwatch.watch(model, on_overflow="continue", **settings) as handle:
        loss(model(inputs)).backward()
        handle._hooks.judging.finish()  # of a late device
        verdict = handle.verdict()
        assert handle.events and [each for each in handle.events if type(each).__name__ == "Fault"] == []
    return verdict


def rows() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.rand(4, SIZE)
    x[1] = 0.0
    return x


BLOCKS = [PreNorm, PostNorm, Parallel, Gated, GateItself, Attention, Product, Two, Down]


@pytest.mark.quick(16)
@pytest.mark.parametrize("how", ["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_leaf_is_named(block, how, way):
    found = verdict_of(Net(block, how), rows())

    assert (found.module, found.cls, found.phase, found.value) == ("block.fault", "Fault", "backward", "nan")
    assert (found.certainty, found.role, found.between) == ("established", "grad input[0]", None), found


@pytest.mark.parametrize(
    "block, able", [(Exponential, "its own code"), (ScaledFirst, "its own code"), (TwoFaults, "`block.other`")]
)
def test_where_two_can_have_made_it_both_are_said(block, able):
    found = verdict_of(Net(block), rows())

    assert found.certainty == "supported"
    assert able in found.statement
    assert "`block.fault`" in found.statement


class Tied(nn.Module):
    """The head's weight is the embedding's. In float16 the head's part of its gradient overflows."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SIZE, SIZE, dtype=torch.float16)
        self.shift = nn.Linear(SIZE, SIZE, dtype=torch.float16)
        self.head = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float16)
        nn.init.eye_(self.embed.weight)
        with torch.no_grad():
            self.shift.weight.copy_(torch.eye(SIZE) * 0.01)
            self.shift.bias.fill_(4000.0)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.shift(self.embed(tokens)))


def test_of_tied_weights_the_one_whose_part_overflowed_is_named():
    found = verdict_of(Tied(), torch.zeros(64, dtype=torch.int64), loss=lambda out: out.float().sum())

    assert (found.module, found.phase, found.value) == ("head", "backward", "+inf"), found
    assert "grad weight of `head` (Linear)" in found.statement
    assert found.certainty == "established", found


def test_under_sync_a_device_tells_it_in_time(late):
    model = Net(Attention)
    with gpuwatch.watch(model, sync=True) as handle:
        with pytest.raises(OverflowDetected):
            model(rows()).square().mean().backward()
        found = handle.verdict()
    assert (found.module, found.certainty) == ("block.fault", "established")
