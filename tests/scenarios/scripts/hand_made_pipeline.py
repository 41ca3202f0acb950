"""Two stages with send and recv of the script's own, whose code makes it in between: no module is at fault.

forward     the script of rank 0 divides by 0 what its stage returned, and sends that
backward    the script of rank 1 divides by 0 the gradient that it sends back
logged      no pipeline: the ranks are replicas that sum their loss to print it, and rank 1's data is bad
"""

import torch
import torch.distributed as dist
from common import average_gradients, diagonal, finite, run
from torch import nn


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = diagonal(8, 1.0)

    def forward(self, x):
        return self.enter(x)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.leave = diagonal(8, 1.0)

    def forward(self, x):
        return self.leave(x)


def stages(fault):
    rank = dist.get_rank()
    model = Second() if rank else First()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        zero = 0.0 if batch == 2 else 1.0
        optimizer.zero_grad()
        if rank == 0:
            hidden = model(torch.rand(4, 8) + 1)
            assert batch > 2 or finite(hidden)
            sent = hidden / (zero if fault == "forward" else 1.0)
            dist.send(sent.detach(), 1)
            gradient = torch.zeros(4, 8)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            received = torch.zeros(4, 8)
            dist.recv(received, 0)
            assert batch > 2 or finite(received) == (batch < 2 or fault == "backward")
            received.requires_grad_()
            model(received).mean().backward()
            dist.send(received.grad / (zero if fault == "backward" else 1.0), 0)
        optimizer.step()


def replicas():
    model = First()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        x = torch.rand(4, 8)
        if batch == 2 and dist.get_rank() == 1:
            x[0, 0] = float("nan")
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        dist.all_reduce(loss.detach())


def main(fault):
    replicas() if fault == "logged" else stages(fault)


run(main, fault="forward")
