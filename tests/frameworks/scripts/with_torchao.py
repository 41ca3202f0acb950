"""torchao's float8 training under FSDP2. In one batch of one rank the numbers are too large for `block.widen`."""

import gc

import torch
import torch.distributed as dist
from model import BACKENDS, batches, device_of, parse, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import convert_to_float8_training

WIDTH = 32


class Wide(nn.Module):
    """Its products have the sizes that a GPU's float8 needs."""

    def __init__(self):
        super().__init__()
        self.keep = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widen = nn.Linear(WIDTH, WIDTH, bias=False)
        for layer in (self.keep, self.widen):
            nn.init.eye_(layer.weight)
        with torch.no_grad():
            self.widen.weight.mul_(2)

    def forward(self, x):
        return self.widen(self.keep(x))


class WideNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Wide()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.block(x))


ARGS = parse()
device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank = dist.get_rank()
torch.manual_seed(0)
model = WideNet().to(device)
convert_to_float8_training(model, module_filter_fn=lambda module, name: not name.endswith("head"))
fully_shard(model.block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for inputs in batches(rank, ARGS.rank, size=16):
    loss = model(inputs.repeat(1, WIDTH // 8).to(device)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
del model, optimizer, loss  # what still refers to the group may abort the process at its exit (gloo)
gc.collect()
dist.destroy_process_group()
