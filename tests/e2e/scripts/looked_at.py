"""Trains until the file `go` is there. Rank 2 stands in its forward while there is `stand`."""

import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

folder = pathlib.Path(sys.argv[1])


class Stands(nn.Module):
    def forward(self, x):
        while dist.get_rank() == 2 and (folder / "stand").exists() and not (folder / "go").exists():
            for _ in range(50):  # it is nearly always here
                time.sleep(0.01)
        return x


dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), Stands()).half()
over = torch.zeros(1)
with torch.no_grad():
    while not over:
        model(torch.ones(2, 8).half())
        over.fill_(float((folder / "go").exists()))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        time.sleep(0.02)
dist.destroy_process_group()
