"""No DDP: the script sums float16 gradients itself. Each rank's are finite, 4e4; the sum is not."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = diagonal(8, 0.01, torch.float16)
        self.head = diagonal(8, 1.0, torch.float16)

    def forward(self, x):
        return self.head(self.fc(x))


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        loss = model(torch.full((1, 8), 200.0 if batch == 2 else 1.0).half()).float().sum() * 200
        optimizer.zero_grad()
        loss.backward()
        assert batch > 2 or all(finite(parameter.grad) for parameter in model.parameters())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        assert batch > 2 or finite(model.fc.weight.grad) == (batch < 2)
        assert batch > 2 or finite(model.head.weight.grad)
        optimizer.step()


run(main)
