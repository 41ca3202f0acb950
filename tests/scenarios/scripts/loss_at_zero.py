"""DDP. The script's own loss has an infinite gradient: the square root of a model's output that is 0 on one rank."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.head = diagonal(8, 1.0)

    def forward(self, x):
        return self.head(self.embed(x))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(4):
        x = torch.rand(4, 8) + 1
        if batch == 2 and dist.get_rank() == 1:
            x[1] = 0
        loss = model(x).sqrt().mean()
        assert finite(loss) == (batch <= 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
