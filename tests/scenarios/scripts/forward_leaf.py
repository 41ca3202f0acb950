"""DDP. In one batch of one rank the numbers are finite, but twice that is not: `body.up` overflows in its forward."""

import torch
import torch.distributed as dist
from common import Net, finite, run, say
from torch import nn


def main(rank, batch, batches):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for number in range(batches):
        x = torch.rand(4, 8)
        if number == batch and dist.get_rank() == rank:
            x.fill_(3e38)
        loss = model(x).mean()
        assert finite(loss) == (number < batch or (number == batch and dist.get_rank() != rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(f"rank {dist.get_rank()} trained to the end")


run(main, rank=1, batch=2, batches=4)
