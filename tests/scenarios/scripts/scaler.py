"""DDP with autocast in float16 and a GradScaler.

--fault none: its scale is too large at first, four steps are skipped, then it trains. --fault always: the gradient
that `scale` sends back on one rank is inf whatever the scale, so every step is skipped and the scale collapses.
--fault bypassed: the scale is too large, and the script calls the optimizer itself, so that nobody skips the step.
"""

import torch
import torch.distributed as dist
from common import GradientScale, diagonal, finite, run, say
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = diagonal(8, 1.0)
        self.scale = GradientScale()
        self.upper = diagonal(8, 1.0)

    def forward(self, x):
        return self.upper(self.scale(self.lower(x)))


def main(fault):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if fault == "always" and dist.get_rank() == 1:
        model.module.scale.factor = float("inf")
    # the gradient of the sum is the scale: 2**19, 2**18, 2**17, 2**16 are inf in float16, 2**15 is not
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4 if fault == "always" else 2.0**19, growth_interval=1000)
    skipped = 0
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.rand(1, 8)).float().sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault == "bypassed":
            optimizer.step()
            continue
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    if fault == "bypassed":
        assert not all(finite(parameter) for parameter in model.parameters())
        return
    say(f"rank {dist.get_rank()} skipped {skipped}")
    assert skipped == (4 if fault == "none" else 8)
    assert all(finite(parameter) for parameter in model.parameters())


run(main, fault="none")
