"""A training script whose embedding is asked for an index that it does not have, in batch 2."""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1)).cuda()
    for batch in range(4):
        index = torch.arange(8, device="cuda") + (100 if batch == 2 else 0)
        net(index).sum().backward()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
