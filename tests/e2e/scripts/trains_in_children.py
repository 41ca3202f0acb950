"""The rank calls one module, and two children that mp.spawn starts train, to weights of nan."""

import torch
import torch.multiprocessing as mp
from torch import nn


def train(number):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)) * float("nan")).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    nn.Linear(4, 1)(torch.ones(2, 4))
    mp.spawn(train, nprocs=2)
