"""torch's tensor parallel, all ranks in one mesh. On one rank its part of a weight becomes too large."""

import gc

import torch
import torch.distributed as dist
from model import BACKENDS, Net, batches, device_of, parse, say
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ARGS = parse()
device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank = dist.get_rank()
torch.manual_seed(0)
model = Net().to(device)
mesh = init_device_mesh(ARGS.device, (dist.get_world_size(),))
parallelize_module(model, mesh, {"block.widen": ColwiseParallel(), "head": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)  # it mixes tensors and DTensors
for number, inputs in enumerate(batches(0, -1)):
    if (rank, number) == (ARGS.rank, 2):
        with torch.no_grad():
            model.block.widen.weight.to_local().fill_(3e38)  # finite; sums of it are not
    loss = model(inputs.to(device)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
gc.collect()
dist.destroy_process_group()
