"""DDP, until the file `go` is there: rank 1 stands in a hook of its backward, and rank 0 in the reduction."""

import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

go = pathlib.Path(sys.argv[1]) / "go"


def stand(grad):
    while dist.get_rank() == 1 and not go.exists():
        time.sleep(0.01)


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    out = model(torch.randn(6, 8))
    out.register_hook(stand)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
