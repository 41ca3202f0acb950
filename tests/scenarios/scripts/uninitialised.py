"""DDP. Buffers that hold nan because nobody has written to them yet are handed around: no fault.

`copy` writes into one; `unused` is handed one and does not read it; `cache` fills the first rows of one and returns
it whole, and the rest of it is never read.
"""

import torch
from common import diagonal, finite, run
from torch import nn


class Copy(nn.Module):
    def forward(self, x, out):
        return out.copy_(x)


class Unused(nn.Module):
    def forward(self, x, scratch):
        return x * 2


class Cache(nn.Module):
    def forward(self, x, cache):
        cache[: len(x)] = x.detach()
        return cache


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = diagonal(8, 1.0)
        self.copy = Copy()
        self.unused = Unused()
        self.cache = Cache()
        self.head = nn.Linear(8, 1)

    def forward(self, x, out, cache):
        x = self.body(x)
        x = self.unused(self.copy(x, out=out), scratch=cache)
        return self.head(x + self.cache(x, cache)[: len(x)])


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(4):
        out, cache = torch.full((4, 8), float("nan")), torch.full((16, 8), float("nan"))
        loss = model(torch.rand(4, 8), out, cache).mean()
        assert finite(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(finite(parameter) for parameter in model.parameters())


run(main)
