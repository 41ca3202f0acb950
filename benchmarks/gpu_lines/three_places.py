"""A training script for the line `places`: in batch 3 a value overflows in the forward, the loss, the backward or the
step."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn


class Grow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.expm1(x)


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-6)  # a row of zeros has no derivative here


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.grow, self.norm = nn.Linear(8, 8, bias=False), Grow(), Norm()
        self.leave = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(self.grow(x))))


def main(phase: str) -> None:
    """`phase`: in which it overflows; `none`: in none."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for batch in range(6):
        x, scale = torch.randn(4, 8).to(device), torch.ones(4, 1, device=device)
        if batch == 3:
            if phase == "forward":
                x[1] = 100
            elif phase == "backward":
                x[1] = 0
            elif phase == "loss":
                scale[2] = 0
            elif phase == "optimizer":
                optimizer.param_groups[0].update(lr=3e38, weight_decay=100.0)
        loss = net(x).sub(1).square().div(scale).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
