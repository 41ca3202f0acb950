"""FSDP2 over tensor parallel, four ranks: two by two. On one rank, its part of a gathered weight becomes too large."""

import gc

import torch
import torch.distributed as dist
from model import Block, Net, batches, parse, say
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BAD = parse().rank


class Faulty(Block):
    batch = 0

    def forward(self, x):
        if (dist.get_rank(), self.batch) == (BAD, 2):
            weight = self.widen.weight
            assert isinstance(weight, DTensor)
            with torch.no_grad():
                weight.to_local().fill_(3e38)  # finite; sums of it are not
        self.batch += 1
        return super().forward(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = Net()
block = Faulty()
block.load_state_dict(model.block.state_dict())
model.block = block
parallelize_module(model, mesh["tensor"], {"block.widen": ColwiseParallel(), "head": RowwiseParallel()})
fully_shard(model.block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for inputs in batches(mesh["data"].get_local_rank(), -1):
    loss = model(inputs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, block, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13, gloo)
gc.collect()
dist.destroy_process_group()
