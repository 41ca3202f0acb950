"""What the scenarios share: the process group around a training, its command line, and modules that several use."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import witness
from torch import nn


def say(text: str) -> None:
    sys.stdout.write(text + "\n")  # one write, so that two ranks do not mix their lines
    sys.stdout.flush()


def run(main: Callable[..., None], **defaults: Any) -> None:
    """Train in a gloo group. `defaults` are the script's options: `--fault backward` overrides fault="none"."""
    parser = argparse.ArgumentParser()
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = vars(parser.parse_args())
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if os.environ.get(witness.VARIABLE):
        witness.start(dist.get_rank())
    main(**options)
    gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
    dist.barrier()  # and so may a peer that has left before
    dist.destroy_process_group()


def average_gradients(*models: nn.Module) -> None:
    """What DDP does, for models that it does not take."""
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def diagonal(size: int, factor: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A Linear that multiplies by `factor`."""
    linear = nn.Linear(size, size, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(size) * factor)
    return linear


def finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or bool(tensor.isfinite().all())


class Body(nn.Module):
    """Doubles its input in `up`."""

    def __init__(self) -> None:
        super().__init__()
        self.down = diagonal(8, 1.0)
        self.up = diagonal(8, 2.0)

    def forward(self, x):
        return self.up(self.down(x))


class Net(nn.Module):
    """With 3e38 as input, `body.up` overflows in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Length(nn.Module):
    """The length of each row. For a row of zeros its gradient is 0 * inf, as every beginner finds out."""

    def forward(self, x):
        return x.square().sum(-1, keepdim=True).sqrt()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class GradientScale(nn.Module):
    """Leaves the values alone and multiplies their gradient."""

    factor = 1.0

    def forward(self, x):
        return _Scaled.apply(x, self.factor)
