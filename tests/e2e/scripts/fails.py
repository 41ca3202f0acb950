"""In batch --batch, rank --rank ends as --how says, and --second, if there is one, as --then says 50 ms later.

Each of the two writes when it fails into --folder: on a loaded machine the second may come first.
"""

import argparse
import ctypes
import mmap
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def fail(how):
    if how == "raises":
        raise ValueError("boom")
    if how == "allocates":
        torch.empty(1 << 50)
    elif how == "SIGSEGV":
        ctypes.string_at(0)
    elif how == "SIGBUS":
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)
            memory[0] = 1
    elif how == "shm":  # until /dev/shm is full: torch's shared memory comes page by page, as it is written
        held = []
        while True:
            held.append(torch.ones(4 << 20).share_memory_())
    else:
        os.kill(os.getpid(), getattr(signal, how))


class Net(nn.Module):
    how = ""

    def __init__(self, note):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.note = note

    def forward(self, x):
        x = self.fc(x)
        if self.how:
            self.note.write_text(str(time.monotonic_ns()))
            fail(self.how)
        return x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--then", default="raises")
    parser.add_argument("--second", type=int, default=-1)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net(options.folder / f"failed-{rank}")
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in range(options.batch + 3):
        if batch == options.batch:
            dist.barrier()
            if rank == options.second:
                time.sleep(0.05)
            net.how = {options.rank: options.how, options.second: options.then}.get(rank, "")
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
