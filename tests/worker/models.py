"""Models that several tests watch."""

from __future__ import annotations

import math

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.fc2(self.fc1(x).relu())


def block_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(4, 2))


def tanh_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class Multiplies(nn.Module):
    def __init__(self, factor=math.inf) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class ReturnsDTensor(nn.Linear):
    """As ColwiseParallel(use_local_output=False) has it do."""

    def forward(self, x):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (1,))
        return DTensor.from_local(super().forward(x), mesh, [Shard(0)], run_check=False)
