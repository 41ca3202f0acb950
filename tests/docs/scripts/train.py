"""The script that the docs call train.py: it trains for a few batches, on any number of ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn

ranked = "RANK" in os.environ
if ranked:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
replica = nn.parallel.DistributedDataParallel(model) if ranked else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    replica(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if ranked:
    dist.monitored_barrier()  # in this thread: one of gloo's own may abort the process at its end
    dist.destroy_process_group()
