"""Trains for as long as it is let; says when it has begun."""

import sys
import time

import torch
from torch import nn

model = nn.Linear(4, 4)
for batch in range(100_000):
    model(torch.ones(2, 4))
    if batch == 3:
        print("training", flush=True)
        sys.stdout.flush()
    time.sleep(0.01)
