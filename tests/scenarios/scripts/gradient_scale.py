"""DDP in float16. A custom autograd function in `scale` multiplies the gradient beyond float16's range."""

import torch
import torch.distributed as dist
from common import GradientScale, diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = diagonal(8, 1.0, torch.float16)
        self.scale = GradientScale()
        self.upper = diagonal(8, 1.0, torch.float16)

    def forward(self, x):
        return self.upper(self.scale(self.lower(x)))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in range(4):
        model.module.scale.factor = 1e5 if batch == 2 and dist.get_rank() == 0 else 0.5
        loss = model(torch.rand(4, 8).half()).float().sum()
        assert finite(loss) == (batch <= 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
