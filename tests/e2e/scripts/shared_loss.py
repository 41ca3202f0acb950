"""Two ranks of which one's loss becomes bad in batch 3, with a collective between forward and backward: `--shares`."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x).relu() * self.factor * self.factor)


class OwnLoss(torch.autograd.Function):
    """The graph shows no operation of it."""

    @staticmethod
    def forward(ctx, chance):
        ctx.save_for_backward(chance)
        return -chance.log().mean()

    @staticmethod
    def backward(ctx, gradient):
        (chance,) = ctx.saved_tensors
        return -gradient / chance / chance.numel()


def shared(loss: torch.Tensor, out: torch.Tensor, how: str) -> torch.Tensor:
    """The loss that the backward begins from."""
    if how == "logs":
        dist.all_reduce(loss.detach().clone())
    elif how == "gathers":
        dist.all_gather([torch.zeros(()) for _ in range(2)], loss.detach())
    elif how == "metric":
        dist.all_reduce((out.detach() > 0).float().mean())
    elif how == "objects":
        dist.all_gather_object([None, None], loss.item())
    elif how == "in place":
        dist.all_reduce(loss.data)
    elif how == "mean":
        loss = all_reduce(loss) / 2
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shares", required=True)
    parser.add_argument("--bad", choices=("loss", "own loss", "forward", "backward"), default="loss")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for batch in range(5):
        bad = options.bad if batch == 3 and dist.get_rank() == 1 else ""
        net.factor = 1e30 if bad == "forward" else 1.0
        out = net(torch.randn(4, 8))
        chance = out.softmax(-1)[:, 0] * (0.0 if bad in ("loss", "own loss") else 1.0)
        if bad == "backward":
            loss = (out * 0).square().sum().sqrt()
        else:
            loss = OwnLoss.apply(chance) if options.bad == "own loss" else -chance.log().mean()
        shared(loss, out, options.shares).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
