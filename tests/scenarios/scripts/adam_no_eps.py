"""DDP. One rank's Adam has eps=0, and the gradients of `gate` are 0: its update is 0 / 0."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = diagonal(8, 1.0)
        self.gate = nn.Linear(8, 1, bias=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x, side):
        return self.head(self.body(x)) + self.gate(side)


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=0.0 if dist.get_rank() == 1 else 1e-8)
    for batch in range(3):
        loss = model(torch.rand(4, 8) + 1, torch.zeros(4, 8)).mean()
        optimizer.zero_grad()
        loss.backward()
        assert batch > 0 or all(finite(parameter.grad) for parameter in model.parameters())
        optimizer.step()
        assert batch > 0 or finite(model.module.gate.weight) == (dist.get_rank() == 0)


run(main)
