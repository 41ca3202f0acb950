"""DDP in float16, with a loss so small that the gradients are subnormal: it trains badly, nothing is non-finite."""

import torch
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = diagonal(8, 1.0, torch.float16)
        self.head = diagonal(8, 1.0, torch.float16)

    def forward(self, x):
        return self.head(self.fc(x))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(4):
        loss = model((torch.rand(4, 8) + 1).half()).float().sum() * 1e-6
        optimizer.zero_grad()
        loss.backward()
        gradient = model.module.head.weight.grad
        assert 0 < gradient.abs().max() < torch.finfo(torch.float16).smallest_normal
        optimizer.step()
    assert all(finite(parameter) for parameter in model.parameters())


run(main)
