"""No DDP: the script sums float16 gradients itself. Each rank's are finite, 4e4; the sum is not.

--fault element: only element [3, 5], of 4.1e4 on rank 0 and 3.9e4 on rank 1.
"""

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


def main(fault):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        x, scale = torch.full((1, 8), 200.0 if batch == 2 else 1.0), torch.full((8,), 200.0)
        if fault == "element":
            x, scale = torch.full((1, 8), 0.01), torch.full((8,), 0.01)
            scale[3], x[0, 5] = 200.0, (205.0 - 10 * dist.get_rank()) if batch == 2 else 1.0
        loss = (model(x.half()).float() * scale).sum()
        optimizer.zero_grad()
        loss.backward()
        assert batch > 2 or all(finite(parameter.grad) for parameter in model.parameters())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        assert batch > 2 or finite(model.fc.weight.grad) == (batch < 2)
        assert batch > 2 or finite(model.head.weight.grad)
        optimizer.step()


run(main, fault="all")
