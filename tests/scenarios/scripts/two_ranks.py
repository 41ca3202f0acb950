"""DDP. In the same batch, with no collective between them, rank 0 overflows in `body.up` and rank 1 in `head`."""

import torch
import torch.distributed as dist
from common import Body, diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = diagonal(8, 4.0)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        x = torch.rand(4, 8)
        if batch == 2:
            x.fill_((3e38, 1e38)[dist.get_rank()])
        loss = model(x).mean()
        assert finite(loss) == (batch < 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
