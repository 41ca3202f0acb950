"""A training that ends itself when its loss is nan, as many do; on rank 1 a mask is empty in one batch."""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def masked(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (out * mask).sum() / mask.sum()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    net = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for batch in range(6):
        mask = torch.zeros(4, 1) if (batch, rank) == (3, 1) else torch.ones(4, 1)
        loss = masked(net(torch.randn(4, 8)), mask)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training", flush=True)
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
