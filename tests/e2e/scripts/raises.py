"""Rank 0 raises by itself; the others wait for it in a barrier."""

import torch
import torch.distributed as dist
from torch import nn


def fail():
    raise KeyError("no such column: labels")


dist.init_process_group("gloo")
model = nn.Linear(4, 4)
for _ in range(3):
    model(torch.ones(2, 4))
if dist.get_rank() == 0:
    fail()
dist.barrier()
