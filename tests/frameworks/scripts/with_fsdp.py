"""torch's FSDP1 and FSDP2, a model of blocks; `--how` is a key of WAYS."""

import gc

import torch
import torch.distributed as dist
from model import BACKENDS, Net, batches, device_of, parse, say
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

ARGS = parse()


def fsdp1(net):
    net.block = FullyShardedDataParallel(net.block, device_id=device)
    return FullyShardedDataParallel(net, device_id=device)


def fsdp2(net, **more):
    fully_shard(net.block, **more)
    return fully_shard(net, **more)


def fsdp2_bf16(net):
    """With activation checkpointing."""
    apply_activation_checkpointing(net, check_fn=lambda module: module is net.block)
    return fsdp2(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


WAYS = {"fsdp1": fsdp1, "fsdp2": fsdp2, "fsdp2-bf16": fsdp2_bf16}

device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank = dist.get_rank()
torch.manual_seed(0)
model = WAYS[ARGS.how](Net().to(device))
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
