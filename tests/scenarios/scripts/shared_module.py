"""DDP. One module is called three times in a forward, under two names; the third call overflows."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = diagonal(8, 4.0)
        self.again = self.grow
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.again(self.grow(self.again(x))))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    for batch in range(4):
        x = torch.rand(4, 8)
        if batch == 1 and dist.get_rank() == 0:
            x.fill_(1e37)  # 4e37, 1.6e38, 6.4e38
        loss = model(x).mean()
        assert finite(loss) == (batch < 1 or (batch == 1 and dist.get_rank() == 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
