"""DDP. `probe` returns inf on purpose, for a statistic that nothing depends on; the user has a rule for it."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Probe(nn.Module):
    def forward(self, x):
        return x.detach() / 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = diagonal(8, 1.0)
        self.probe = Probe()
        self.head = nn.Linear(8, 1)
        self.largest = 0.0

    def forward(self, x):
        x = self.body(x)
        if dist.get_rank() == 1:
            self.largest = self.probe(x).max().item()
        return self.head(x)


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(4):
        loss = model(torch.rand(4, 8)).mean()
        assert finite(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(finite(parameter) for parameter in model.parameters())
    assert (model.module.largest == float("inf")) == (dist.get_rank() == 1)


run(main)
