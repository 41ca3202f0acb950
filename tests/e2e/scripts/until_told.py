"""Trains under DDP; in batch 3 its ranks wait until a file is there. Run under torchrun, or with RANK and WORLD_SIZE.

With STUBBORN in the environment it does not end at SIGTERM.
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_overflow import Net
from torch import nn

if "STUBBORN" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in range(6):
    if batch == 3:
        sys.stdout.write(f"rank {dist.get_rank()} waits\n")
        sys.stdout.flush()
        while not Path(sys.argv[1]).exists():
            time.sleep(0.05)
    loss = model(torch.rand(4, 8)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
gc.collect()
dist.destroy_process_group()
