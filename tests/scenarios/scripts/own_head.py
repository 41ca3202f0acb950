"""A body in DDP and a head outside of it, whose weights differ by design. The head overflows on rank 1 in batch 2."""

import torch
import torch.distributed as dist
from common import Body, diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.parallel.DistributedDataParallel(Body())
        self.head = diagonal(8, 3.0 + dist.get_rank())

    def forward(self, x):
        return self.head(self.body(x))


def main(batch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    for number in range(batch + 1):
        x = torch.rand(4, 8)
        here = number == batch and dist.get_rank() == 1
        if here:
            x[1] = 1e38
        loss = model(x).mean()
        assert finite(loss) == (not here)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, batch=2)
