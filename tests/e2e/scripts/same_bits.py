"""Fifty steps in one of the ways to train; prints every loss and a hash of the weights, bit for bit. Under torchrun."""

import contextlib
import gc
import hashlib
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu_(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def say(text):
    sys.stdout.write(f"rank {dist.get_rank()} {text}\n")
    sys.stdout.flush()


def main(kind):
    torch.manual_seed(dist.get_rank())
    model = Net()
    if kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "amp", growth_interval=10)
    cast = torch.autocast("cpu", torch.bfloat16) if kind == "amp" else contextlib.nullcontext()
    for step in range(50):
        ids = torch.randint(100, (4, 16))
        with cast:
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if kind != "fsdp":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        say(f"step {step} loss {loss.detach().double().item().hex()}")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    say(f"weights {digest.hexdigest()}")
    say(f"random {torch.rand(1).item()} {random.Random(0).random()} scale {scaler.get_scale()}")


dist.init_process_group("gloo")
main(sys.argv[1])
gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
dist.destroy_process_group()
