"""DDP with gradients accumulated over two micro-batches; the first, under no_sync, has the fault on one rank."""

import torch
import torch.distributed as dist
from common import Length, diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.length = Length()
        self.head = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.length(self.embed(x)))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(4):
        first, second = torch.rand(4, 8), torch.rand(4, 8)
        if step == 2 and dist.get_rank() == 1:
            first[1] = 0
        optimizer.zero_grad()
        with model.no_sync():
            (model(first).mean() / 2).backward()
        good = finite(model.module.embed.weight.grad)
        assert good == (step < 2 or (step == 2 and dist.get_rank() == 0))
        (model(second).mean() / 2).backward()
        optimizer.step()


run(main)
