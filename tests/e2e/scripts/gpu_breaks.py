"""Two ranks train; in batch 3 the GPU of rank 1 breaks, in the stand-in for NVML and in its numbers."""

import os
from pathlib import Path

import torch
from torch import nn

RANK = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
for batch in range(6):
    inputs = torch.rand(4, 8)
    if RANK == 1 and batch == 3:
        with Path(os.environ["STAND_IN_NVML"]).open("a") as told:
            told.write("1 xid 94\n1 ecc_uncorrected_volatile 2\n1 remap_pending 1\n")
        with torch.no_grad():
            model[0].weight.fill_(3e38)  # finite; the sums are not
    model(inputs).sum().backward()
