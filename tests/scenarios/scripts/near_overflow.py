"""DDP in float16. On one rank `up` returns 5e4: less than a power of two below the largest number, and finite."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = diagonal(8, 2.0, torch.float16)
        self.down = diagonal(8, 1e-3, torch.float16)

    def forward(self, x):
        return self.down(self.up(x))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        x = torch.rand(1, 8).half()
        if batch == 2 and dist.get_rank() == 1:
            x.fill_(2.5e4)
        loss = model(x).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(finite(parameter) for parameter in model.parameters())


run(main)
