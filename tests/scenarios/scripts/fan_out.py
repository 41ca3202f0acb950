"""DDP in float16. Two modules use what `block.enter` returned; each sends back 4e4, and the sum overflows."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = diagonal(8, 1e-3, torch.float16)
        self.left = diagonal(8, 1.0, torch.float16)
        self.right = diagonal(8, 1.0, torch.float16)

    def forward(self, x):
        x = self.enter(x)
        return self.left(x), self.right(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        weight = 4e4 if batch == 2 and dist.get_rank() == 1 else 1.0
        left, right = model(torch.full((1, 8), 1e-2).half())
        loss = (left.float().sum() + right.float().sum()) * weight
        assert finite(loss) == (batch <= 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
