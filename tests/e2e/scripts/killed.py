"""Rank 1 is killed by SIGKILL in the middle of the forward of `middle.deadly`, in batch 2."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn


class Deadly(nn.Module):
    calls = 0

    def forward(self, x):
        if dist.get_rank() == 1 and self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        return x


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.deadly = Deadly()

    def forward(self, x):
        return self.deadly(self.first(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.middle = Middle()

    def forward(self, x):
        return self.middle(self.start(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
