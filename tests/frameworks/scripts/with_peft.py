"""peft: LoRA on one layer, under DDP."""

import gc

import peft
import torch
import torch.distributed as dist
from model import Net, batches, parse, say

BAD = parse().rank
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["widen"]))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1e-6)
for inputs in batches(rank, BAD):
    loss = model(inputs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
gc.collect()
dist.destroy_process_group()
