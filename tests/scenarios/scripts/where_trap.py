"""DDP. `block` guards a square root with torch.where, which guards the value and not the gradient: 0 * inf."""

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
        return self.leave(torch.where(x > 0, x.sqrt(), torch.zeros_like(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.block = Block()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(4):
        x = torch.rand(4, 8) + 1
        if batch == 1 and dist.get_rank() == 0:
            x[1] = 0
        loss = model(x).mean()
        assert finite(
            loss
        )  # later, too: a comparison with nan is False, so the weights' nan is hidden by the same where
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
