"""Open MPI: each rank reads its number from mpirun's variables. `--how` is the port at which they meet."""

import gc
import os

import torch
import torch.distributed as dist
from model import Net, batches, parse, say

ARGS = parse()
rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ARGS.how}", rank=rank, world_size=size)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for inputs in batches(rank, ARGS.rank):
    loss = model(inputs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
gc.collect()
dist.destroy_process_group()
