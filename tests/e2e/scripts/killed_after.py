"""A rank that its launcher kills after the training, as Ray does. "left": once it has left its process group."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _batch in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    if "left" in sys.argv:
        dist.destroy_process_group()
    if "goes on" in sys.argv:
        model(torch.ones(4, 8))
os._exit(1)
