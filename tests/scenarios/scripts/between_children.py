"""DDP. `block` squares what `block.enter` returns before it hands it to `block.leave`; of 2e19 that is too much."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = diagonal(8, 1.0)
        self.leave = diagonal(8, 1.0)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(x * x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.block(x))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        x = torch.rand(4, 8)
        if batch == 1 and dist.get_rank() == 0:
            x.fill_(2e19)
        loss = model(x).mean()
        assert finite(loss) == (batch < 1 or (batch == 1 and dist.get_rank() == 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
