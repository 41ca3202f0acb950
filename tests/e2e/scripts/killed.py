"""Rank 1 is killed in the middle of the forward of `middle.deadly`, in batch 2: by SIGKILL, or as its argument says."""

import ctypes
import mmap
import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn


def die(how):
    if how == "SIGBUS":  # as of a full /dev/shm: memory of a mapped file that is not there
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)
            memory[0] = 1
    elif how == "SIGSEGV":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), getattr(signal, how))


class Deadly(nn.Module):
    calls = 0

    def forward(self, x):
        if dist.get_rank() == 1 and self.calls == 2:
            die(sys.argv[1] if len(sys.argv) > 1 else "SIGKILL")
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
