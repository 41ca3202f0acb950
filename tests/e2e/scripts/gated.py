"""Trains under DDP, with batches in the middle that need no other rank, and a gate before and one after them.

At a gate, a named pipe, it waits until somebody has opened it for writing and closed it again. In batch 4, one of those
without communication, the numbers of rank 1 are too large for `widen`, if OVERFLOWS is set. With GATE_BEFORE_INIT
the first gate is before the process group is made.
"""

import gc
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_overflow import Block
from torch import nn

BATCHES, ALONE, BAD = 9, range(3, 6), 4


def main():
    before, after = (Path(path) for path in os.environ["GATES"].split(os.pathsep))
    if "GATE_BEFORE_INIT" in os.environ:
        before.read_text()
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ.get("GROUP_TIMEOUT_S", 1800))))
    model = nn.parallel.DistributedDataParallel(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    for batch in range(BATCHES):
        if batch == ALONE.start and "GATE_BEFORE_INIT" not in os.environ:
            before.read_text()
        if batch == ALONE.stop:
            after.read_text()
        inputs = torch.rand(4, 8)
        if batch == BAD and dist.get_rank() == 1 and "OVERFLOWS" in os.environ:
            inputs.fill_(3e38)  # finite; twice that is not, in float32
        optimizer.zero_grad()
        with model.no_sync() if batch in ALONE else nullcontext():
            model(inputs).mean().backward()
        if batch not in ALONE:
            optimizer.step()
        print(f"rank {dist.get_rank()} batch {batch}", flush=True)
    del model, optimizer  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
