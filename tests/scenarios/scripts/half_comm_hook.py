"""DDP with a communication hook that sums in float16 and does not divide: 4e4 + 4e4 is above 65504."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = diagonal(8, 1.0)

    def forward(self, x):
        return self.fc(x)


def summed_in_half(state, bucket):
    half = bucket.buffer().half()
    assert finite(half)
    dist.all_reduce(half)
    future = torch.futures.Future()
    future.set_result(half.float())
    return future


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    model.register_comm_hook(None, summed_in_half)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        loss = model(torch.full((1, 8), 4e4 if batch == 2 else 1.0)).sum()
        optimizer.zero_grad()
        loss.backward()
        assert batch > 2 or finite(model.module.fc.weight.grad) == (batch < 2)
        optimizer.step()


run(main)
