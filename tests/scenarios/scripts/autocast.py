"""DDP with autocast. `up` returns 1e5 on one rank: above float16's largest number, and nothing to bfloat16."""

import torch
import torch.distributed as dist
from common import Net, finite, run
from torch import nn


def main(dtype):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for batch in range(4):
        x = torch.rand(4, 8)
        if batch == 2 and dist.get_rank() == 1:
            x.fill_(5e4)
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            loss = model(x).float().mean()
        assert finite(loss) == (dtype == "bfloat16" or batch < 2 or (batch == 2 and dist.get_rank() == 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, dtype="float16")
