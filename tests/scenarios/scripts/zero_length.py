"""DDP. The forward is finite; the backward of `length` at a row of zeros is nan, on one rank."""

import torch
import torch.distributed as dist
from common import Length, diagonal, finite, run, say
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.length = Length()
        self.head = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.length(self.embed(x)))


def main(rank, batch):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for number in range(batch + 3):
        x = torch.rand(4, 8)
        if number == batch and dist.get_rank() == rank:
            x[1] = 0
        loss = model(x).mean()
        assert finite(loss) == (number <= batch)
        optimizer.zero_grad()
        loss.backward()
        say(f"rank {dist.get_rank()} batch {number}: backward done")
        try:
            optimizer.step()
        finally:
            good = all(finite(parameter) for parameter in model.parameters())
            say(f"rank {dist.get_rank()} batch {number}: weights {'finite' if good else 'bad'}")


run(main, rank=1, batch=2)
