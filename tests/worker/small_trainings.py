"""Small trainings, and the remarks on their steps."""

from __future__ import annotations

import torch
from gpuwatch.collector.assemble.insights import find_insights
from gpuwatch.core.codes import Code
from torch import nn

BATCHES = 20
LARGE = 3e20
"""Times this the gradients are finite in float32, and their squares are not."""


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def sgd(model: nn.Module, lr: float = 0.01, **settings) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def train(model, optimizer, *, batches=BATCHES, factor=lambda batch: 1.0, before_step=clip, dtype=torch.float32):
    for batch in range(batches):
        (model(torch.randn(6, 8, dtype=dtype)) * factor(batch)).sum().backward()
        before_step(model)
        optimizer.step()
        optimizer.zero_grad()


def remarks(watched):
    """Those on steps, after the script has ended."""
    found = find_insights(watched.facts(), 0, {})
    assert all(each.kind != "unknown" for each in found)
    return [each for each in found if each.code in (Code.GRADIENTS_ZEROED, Code.WEIGHTS_UNMOVED)]
