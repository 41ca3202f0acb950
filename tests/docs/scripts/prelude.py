"""What the docs' Python takes for granted."""

import gpuwatch  # noqa: F401
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
x = hidden = torch.ones(4, 8)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
