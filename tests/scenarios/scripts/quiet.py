"""Healthy trainings that look close to trouble and are not: no warning may be given.

--kind lora: an adapter whose last weight begins at zero, so that its gradients are exactly zero at first. --kind
scaled: float16 under a GradScaler, whose scale brings gradients close to the largest number by design.
"""

import torch
import torch.distributed as dist
from common import average_gradients, diagonal, finite, run
from torch import nn


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = diagonal(8, 1.0)
        self.base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def main(kind):
    if kind == "lora":
        model = Adapted()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(12):
            optimizer.zero_grad()
            (model(torch.rand(4, 8)) - 1).square().mean().backward()
            average_gradients(model)
            optimizer.step()
        assert not bool((model.lora_b.weight == 0).all())
        return
    model = nn.Sequential(diagonal(8, 1.0), diagonal(8, 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4e4)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.full((1, 8), 1.0)).float().sum()
        scaler.scale(loss).backward()
        assert finite(model[0].weight.grad)
        assert float(model[0].weight.grad.abs().max()) > 32768
        scaler.step(optimizer)
        scaler.update()
    dist.barrier()


run(main, kind="lora")
