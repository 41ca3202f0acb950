"""DDP. A weight is nan before the first batch: on one rank, or, as from a broken checkpoint, on all of them."""

import torch
import torch.distributed as dist
from common import Net, run
from torch import nn


def main(where):
    net = Net()
    with torch.no_grad():
        if where == "all":
            net.head.weight[0, 3] = float("nan")
        model = nn.parallel.DistributedDataParallel(net)  # copies rank 0's weights to the others
        if where == "one" and dist.get_rank() == 1:
            net.head.weight[0, 3] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(3):
        loss = model(torch.rand(4, 8)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, where="one")
