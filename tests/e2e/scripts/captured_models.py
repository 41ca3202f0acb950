"""Modules of captured_faults.py that it imports: a line that makes a bad value ends in `# <name of the fault>`."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


@dataclass
class Config:
    width: int = 8
    power: float = 30.0


class RmsNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(config.width))

    def forward(self, x):
        x = x * 0
        return self.weight * x * x.pow(2).mean(-1, keepdim=True).rsqrt()  # custom_norm


class Close(nn.Module):
    """256.4 and 256 are the same number in bfloat16."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.fc.weight, 256.4 / 8)

    def forward(self, x):
        return 1 / (self.fc(torch.ones_like(x)) - 256)  # bf16_autocast


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        nn.init.constant_(self.fc.weight, 100.0)

    def forward(self, x):
        return self.fc(x.abs() * 100 + 100)  # fp16


class GatherLog(nn.Module):
    def forward(self, x):
        picked = x.relu().gather(1, torch.zeros(x.shape[0], 1, dtype=torch.long))
        return x - (picked * 0).log()  # gather


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.exp(x + 1e3)  # custom_function

    @staticmethod
    def backward(ctx, grad):
        return grad


class WithFunction(nn.Module):
    def forward(self, x):
        return Doubling.apply(x)


class AllDropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x / self.drop(torch.ones(4)).sum()  # dropout


class OnlyKeywords(nn.Module):
    def forward(self, *, hidden, scale):
        return hidden.abs().add(1) * scale  # keywords


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Structured(nn.Module):
    def forward(self, pair, options):
        scores = pair[0] @ pair[1].T
        return scores.masked_fill(options["mask"], -math.inf).softmax(-1)  # structured named_tuple


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, eps=0.0)
        self.norm.running_var.zero_()
        self.register_buffer("shift", torch.full((8,), 3.0), persistent=False)

    def forward(self, x):
        return self.norm(x + self.shift)  # batch_norm


class Recurrent(nn.Module):
    """Tied weights, a list of weights in an LSTM, hooks of weight_norm, and a compiled part."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.first = nn.utils.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):
        hidden, _ = self.lstm(self.first(x)[None])
        return (self.tied(self.head(hidden)).abs() + 100) ** self.config.power  # tied
