"""A task of mpirun: after two batches rank 1 raises. The others wait for ever, as in a collective that nobody ends.

The first word on its command line is a folder, in which the ranks meet.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

folder = Path(sys.argv[1])
rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
model = nn.Linear(4, 4)
for _batch in range(2):
    model(torch.ones(2, 4)).sum().backward()
dist.barrier()
print(f"rank {rank} has trained", flush=True)
if rank == 1:
    raise ValueError("as it was asked to")
while True:
    time.sleep(1)
