"""peft: LoRA on one layer, under DDP."""

import gc

import peft
import torch
import torch.distributed as dist
from model import BACKENDS, Net, batches, device_of, parse, say

ARGS = parse()
device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank = dist.get_rank()
torch.manual_seed(0)
model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["widen"])).to(device)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1e-6)
for inputs in batches(rank, ARGS.rank):
    loss = model(inputs.to(device)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
gc.collect()
dist.destroy_process_group()
