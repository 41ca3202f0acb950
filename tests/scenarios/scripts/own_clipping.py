"""The script divides finite gradients by 0 between backward and step: by a norm that is wrong, or by a count.

rank      by a norm, after the reduction, on rank 1 alone
all       by a norm, after the reduction, on all ranks: the gradient of `fc` is 0 there, and 0 / 0 is nan
tokens    by its own count of tokens, which is 0 on rank 1, before the reduction: all ranks get inf
"""

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


def main(fault):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(4):
        now, mine = batch == 2, dist.get_rank() == 1
        inputs = torch.zeros(4, 8) if now and fault == "all" else torch.rand(4, 8) + 1
        loss = model(inputs).mean()
        optimizer.zero_grad()
        loss.backward()
        assert batch > 2 or all(finite(parameter.grad) for parameter in model.parameters())
        if fault == "tokens":
            for parameter in model.parameters():
                parameter.grad /= 0.0 if now and mine else 4.0
        average_gradients(model)
        assert batch > 2 or fault == "tokens" or all(finite(parameter.grad) for parameter in model.parameters())
        gradient = model.fc.weight.grad
        if fault != "tokens":
            gradient /= 0.0 if now and mine and fault == "rank" else gradient.norm()
        assert batch > 2 or finite(gradient) != (now and (mine or fault != "rank"))
        optimizer.step()


run(main, fault="rank")
