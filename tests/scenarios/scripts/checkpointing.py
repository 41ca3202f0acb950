"""DDP with activation checkpointing of each block, whose forward runs again during the backward.

--fault forward: `blocks.0.enter` overflows. --fault backward: the gradient of `blocks.1.root` at 0 is inf.
"""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn
from torch.utils.checkpoint import checkpoint


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = diagonal(8, 2.0)
        self.root = Root()
        self.leave = diagonal(8, 1.0)

    def forward(self, x):
        return self.leave(self.root(self.enter(x)))


class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.embed = diagonal(8, 1.0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def main(fault, reentrant):
    model = nn.parallel.DistributedDataParallel(Net(bool(reentrant)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        x = torch.rand(4, 8) + 1
        if batch == 2 and dist.get_rank() == 1:
            x[1] = 2e38 if fault == "forward" else 0
        loss = model(x).mean()
        assert finite(loss) == (batch < 2 or (batch == 2 and (fault == "backward" or dist.get_rank() == 0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="forward", reentrant=0)
