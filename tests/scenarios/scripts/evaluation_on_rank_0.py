"""DDP in which rank 0 alone evaluates, as nanoGPT does: the ranks count different batches, and their steps agree.

In step 4 rank 1 is fed numbers that `head` cannot double. Its weights are those of rank 0, at that step.
"""

import torch
import torch.distributed as dist
from common import diagonal, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = diagonal(8, 1.0).requires_grad_(False)
        self.head = diagonal(8, 2.0)

    def forward(self, x):
        return self.head(self.body(x))


def main(fault):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        if step == 2 and dist.get_rank() == 0:
            with torch.no_grad():
                for _ in range(3):
                    model(torch.rand(4, 8))
        x = torch.rand(4, 8)
        if step == 4 and dist.get_rank() == 1 and fault == "overflow":
            x += 2.5e38
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="overflow")
