"""Trains in one process, without torch.distributed; in batch 2 the numbers are too large for `1`, if it is asked to."""

import sys
import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in range(4):
    if "overflow" in sys.argv and batch == 2:
        with torch.no_grad():
            model[1].weight.fill_(3e38)
    if "raise" in sys.argv and batch == 2:
        raise ValueError("as it was asked to")
    try:
        loss = model(torch.ones(4, 8)).mean()
    except ValueError:
        while "swallow" in sys.argv:
            time.sleep(1)
        raise
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"batch {batch} loss {loss.item()}", flush=True)
if "exit" in sys.argv:
    sys.exit(7)
