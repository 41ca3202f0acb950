"""Replicas on four ranks, each without DDP's help, and faults of a JSON list: [kind, tensor, rank, batch].

`flip`: a bit in the memory of a finite weight. `garbage`: a buffer that to_empty() left on one rank (batch 0), or that
was overwritten in memory. `missed`: a broadcast from rank 0 whose result one rank throws away.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (100 ** (torch.arange(0, 8) / 8)), persistent=False)

    def forward(self, x):
        return x * torch.cos(self.inv_freq)


class Biased(nn.Module):
    """Attention's scores with a mask of -inf and slopes, both buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, x):
        x = self.norm(x).reshape(-1, 4, 8)
        scores = x @ x.transpose(1, 2) + self.mask - self.slopes * torch.arange(4.0)
        return (scores.softmax(-1) @ x).reshape(-1, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.biased = Rotary(), Biased()
        self.table = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)  # of each rank's own data: meant to differ
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = self.bn(self.rotary(x) + self.table(torch.arange(len(x)) % 12))
        x = x + self.conv(x[:, None]).mean(1)
        return x + self.mlp(self.biased(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def put_in(net, kind, name, batch):
    owner, _, last = name.rpartition(".")
    module, tensor = net.get_submodule(owner), dict([*net.named_parameters(), *net.named_buffers()])[name]
    if kind == "flip":
        tensor.data.view(torch.int32).view(-1)[1] ^= 1 << 12
    elif kind == "garbage" and batch == 0:
        module._buffers[last] = torch.empty_like(tensor, device="meta")
        module._buffers[last] = torch.empty_like(module._buffers[last], device="cpu").copy_(torch.rand(tensor.shape))
    elif kind == "garbage":
        tensor.data.copy_(torch.rand(tensor.shape) + 0.1)


def main():
    faults = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = Net()
    missed = {name: batch for kind, name, of, batch in faults if kind == "missed" and of == rank}
    again = {name: batch for kind, name, _, batch in faults if kind == "missed"}
    everything = dict([*net.named_parameters(), *net.named_buffers()])
    for name, tensor in everything.items():
        received = tensor.detach().clone() if missed.get(name) == 0 else tensor.detach()
        dist.broadcast(received, 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for batch in range(12):
        for name, when in again.items():  # the script sends this tensor anew, as a codebook
            if when == batch > 0:
                tensor = everything[name].detach()
                tensor = tensor.clone() if missed.get(name) == batch else tensor
                dist.broadcast(tensor.mul_(1.5) if rank == 0 else tensor, 0)
        for kind, name, of, when in faults:
            if of == rank and when == batch:
                put_in(net, kind, name, batch)
        net(torch.randn(8, 8)).square().mean().backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
