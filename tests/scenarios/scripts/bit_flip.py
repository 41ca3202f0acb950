"""DDP. A high exponent bit of one weight flips on one rank, as bad memory does it: nothing in torch notices.

1.0 becomes inf; 0.5 becomes 1.7e38, finite, and the module's output overflows.
"""

import torch
import torch.distributed as dist
from common import diagonal, run
from torch import nn

INF, HUGE = 1.0, 0.5


class Encoder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.gain = diagonal(8, weight)

    def forward(self, x):
        return self.gain(x)


class Net(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.encoder = Encoder(weight)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


def main(becomes):
    model = nn.parallel.DistributedDataParallel(Net(INF if becomes == "inf" else HUGE))
    weight = model.module.encoder.gain.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-10)
    for batch in range(5):
        if batch == 3 and dist.get_rank() == 1:
            weight.data.view(torch.int32)[2, 2] ^= 1 << 30  # through .data: no version counter moves
            assert weight[2, 2].item() == (float("inf") if becomes == "inf" else 2.0**127)
        loss = model(torch.rand(4, 8) + 4).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, becomes="inf")
