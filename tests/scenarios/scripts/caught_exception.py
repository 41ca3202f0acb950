"""A forward raises in the middle of a module, the script catches it and goes on; perhaps with a real fault later."""

import torch
import torch.distributed as dist
from common import Body, average_gradients, finite, run, say
from torch import nn


class Guard(nn.Module):
    def forward(self, x):
        if x[0, 0] < 0:
            raise ValueError("a sample to be left out")
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.guard = Guard()
        self.body = Body()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(self.guard(x)))


def main(fault):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    left_out = 0
    for batch in range(6):
        x = torch.rand(4, 8)
        if batch == 2 and dist.get_rank() == 1:
            x[0, 0] = -1
        if batch == 4 and dist.get_rank() == 1 and fault == "later":
            x.fill_(3e38)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        try:
            loss = model(x).mean()
        except ValueError:
            left_out += 1
        else:
            assert finite(loss) or batch >= 4
            loss.backward()
        average_gradients(model)
        optimizer.step()
    say(f"rank {dist.get_rank()} left out {left_out}")
    assert finite(model.body.up.weight) == (fault == "none")


run(main, fault="none")
