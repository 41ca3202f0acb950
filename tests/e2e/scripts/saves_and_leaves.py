"""Trains under DDP until a signal comes; then all ranks save in the same batch, and leave with exit code 7.

`saves_and_leaves.py SIGNAL [STORE [SECONDS]]`: SIGTERM, SIGUSR1. With STORE, a file, it is a task of srun, without
torchrun. A rank saves for so many SECONDS as its number says: rank 0 for none.
"""

import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from ddp_overflow import Net
from torch import nn

told = []
signal.signal(getattr(signal, sys.argv[1]), lambda number, frame: told.append(number))
if len(sys.argv) > 2:
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=size)
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in range(10**6):
    loss = model(torch.rand(4, 8)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if batch == 3:
        sys.stdout.write(f"rank {dist.get_rank()} is under way\n")
        sys.stdout.flush()
    flag = torch.tensor(float(bool(told)))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if flag:
        with tempfile.TemporaryFile() as file:
            torch.save(model.state_dict(), file)
            os.fsync(file.fileno())
        if len(sys.argv) > 3:
            time.sleep(dist.get_rank() * float(sys.argv[3]))
        sys.stdout.write(f"rank {dist.get_rank()} has saved, and heard {len(told)}\n")
        sys.stdout.flush()
        sys.exit(7)
    time.sleep(0.01)
