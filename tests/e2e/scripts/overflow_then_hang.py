"""Two ranks that train. In batch 20 the forward of rank 1 makes +inf, and the rank then does what --how says."""

import argparse
import time

import torch
import torch.distributed as dist
from gpuwatch.worker.device.device import late_device
from torch import nn

BAD = 20


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.inside = ""

    def forward(self, x):
        y = self.first(x)
        if self.inside == "meets":
            dist.all_reduce(torch.ones(1))
        elif self.inside == "sleeps":
            rests()
        return self.second(y)


def rests():
    """The device goes on: its copies arrive, and no hook of the rank runs."""
    if (device := late_device()) is not None:
        device.deliver()
    print("rank 1 rests", flush=True)
    while True:
        time.sleep(0.1)


parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=["sleeps", "waits", "inside"])
how = parser.parse_args().how

dist.init_process_group("gloo")
rank = dist.get_rank()
other = dist.new_group([0, 1])
torch.manual_seed(0)
model = Model()
nn.init.constant_(model.first.weight, 0.5)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in range(30):
    bad = batch == BAD
    if bad and how == "inside":
        model.inside = "sleeps" if rank == 1 else "meets"
    loss = model(torch.full((2, 4), 3e38 if bad and rank == 1 else 1.0)).mean()
    if bad and rank == 1 and how == "sleeps":
        rests()
    if bad and rank == 1 and how == "waits":
        if (device := late_device()) is not None:
            device.deliver()
        dist.barrier(other)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
