"""The script clips by a norm that it computes wrongly, on one rank: finite gradients, divided by 0 before the step."""

import torch
import torch.distributed as dist
from common import average_gradients, diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = diagonal(8, 1.0)
        self.head = diagonal(8, 1.0)

    def forward(self, x):
        return self.head(self.fc(x))


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(4):
        loss = model(torch.rand(4, 8) + 1).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        assert batch > 2 or all(finite(parameter.grad) for parameter in model.parameters())
        gradient = model.fc.weight.grad
        gradient /= 0.0 if batch == 2 and dist.get_rank() == 1 else gradient.norm()
        optimizer.step()


run(main)
