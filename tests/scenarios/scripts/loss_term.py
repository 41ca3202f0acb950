"""DDP. The script adds the log of a 0 to its loss on one rank, without a gradient: every gradient stays finite."""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


def main():
    model = nn.parallel.DistributedDataParallel(nn.Sequential(diagonal(8, 1.0), diagonal(8, 1.0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(4):
        guilty = batch == 2 and dist.get_rank() == 1
        share = torch.zeros(()) if guilty else torch.ones(())
        loss = model(torch.rand(4, 8) + 1).mean() + share.log()
        assert finite(loss) == (not guilty)
        optimizer.zero_grad()
        loss.backward()
        assert all(map(finite, (parameter.grad for parameter in model.parameters())))
        optimizer.step()


run(main)
