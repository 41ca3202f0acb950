"""DDP. nan and inf come and go inside one module's own forward; what it returns is finite: no fault."""

import torch
from common import diagonal, finite, run
from torch import nn


class Ratio(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            ratio = torch.nan_to_num(x / torch.zeros_like(x), nan=0.0, posinf=1.0, neginf=-1.0)
        return x * ratio


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = diagonal(8, 1.0)
        self.ratio = Ratio()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.ratio(self.body(x)))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(4):
        loss = model(torch.rand(4, 8) - 0.5).mean()
        assert finite(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(finite(parameter) for parameter in model.parameters())


run(main)
