"""A derivative that is not finite, and behind it a step of 0/0: Adam without eps."""

import os

import torch
from torch import nn


class Scaled(nn.Module):
    def forward(self, x):
        n = x.square().sum(-1, keepdim=True)
        return x / n.sqrt().clamp(min=1e-6)


torch.manual_seed(0)
adam = "ADAM" in os.environ
model = nn.Sequential(nn.Linear(4, 4), nn.Identity() if adam else Scaled())
optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=0.0 if adam else 1e-8)
for batch in range(8):
    x = torch.randn(8, 4)
    if adam:
        x[:, 2] = 0
    elif batch == 3:
        x[2] = 0
        model[0].bias.data.zero_()
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
