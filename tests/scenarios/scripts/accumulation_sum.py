"""DDP in float16. Each micro-batch's gradient is finite, 4e4; what they add up to is not."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = diagonal(8, 0.01, torch.float16)
        self.head = diagonal(8, 1.0, torch.float16)

    def forward(self, x):
        return self.head(self.fc(x))


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(4):
        x = torch.full((1, 8), 200.0 if step == 2 and dist.get_rank() == 1 else 1.0).half()
        optimizer.zero_grad()
        with model.no_sync():
            (model(x).float().sum() * 200).backward()  # in step 2 of rank 1: 200 * 200
        assert step > 2 or finite(model.module.fc.weight.grad)
        (model(x).float().sum() * 200).backward()
        assert step > 2 or finite(model.module.fc.weight.grad) == (step < 2)  # averaged over the ranks by now
        assert step > 2 or finite(model.module.head.weight.grad)
        optimizer.step()


run(main)
