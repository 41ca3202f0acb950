"""Two ranks; on rank 1, batch 3 has a row of zeros, whose norm has no derivative. `fsdp`: FSDP2 shards the model."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Norm(nn.Module):
    def forward(self, x):
        size = x.square().sum(-1, keepdim=True)
        return x / size.sqrt().clamp(min=1e-6)  # the line


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(4, 4, bias=False), Norm(), nn.Linear(4, 3)

    def forward(self, x):
        return self.leave(self.norm(self.enter(x)))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Net()
if "fsdp" in sys.argv:
    model = fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
else:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in range(5):
    torch.manual_seed(10 * batch + rank)
    x = torch.randn(8, 4)
    if batch == 3 and rank == 1:
        x[2] = 0
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
