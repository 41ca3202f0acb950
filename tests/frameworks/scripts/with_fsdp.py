"""torch's FSDP1: a block, and the model around it."""

import gc

import torch
import torch.distributed as dist
from model import BACKENDS, Net, batches, device_of, parse, say
from torch.distributed.fsdp import FullyShardedDataParallel

ARGS = parse()
device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank = dist.get_rank()
torch.manual_seed(0)
model = Net().to(device)
model.block = FullyShardedDataParallel(model.block, device_id=device)
model = FullyShardedDataParallel(model, device_id=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for inputs in batches(rank, ARGS.rank):
    loss = model(inputs.to(device)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
gc.collect()
dist.destroy_process_group()
