"""DDP in float16. The sum x + fc2(...) of `blocks.1` is too large for float16; what both modules return is not."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = diagonal(8, 1.0, torch.float16)
        self.fc2 = diagonal(8, 1.0, torch.float16)

    def forward(self, x):
        return x + self.fc2(self.fc1(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1, dtype=torch.float16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(4):
        x = torch.rand(4, 8, dtype=torch.float16)
        if batch == 2 and dist.get_rank() == 1:
            x.fill_(2e4)  # doubled by each block: 4e4, then 8e4, above float16's 65504
        loss = model(x).float().mean()
        assert finite(loss) == (batch < 2 or (batch == 2 and dist.get_rank() == 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
