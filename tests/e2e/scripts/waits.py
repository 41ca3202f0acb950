"""Trains for as long as it is let; says when it has begun."""

import os
import sys
import time

import torch
from torch import nn

model = nn.Linear(4, 4)
for batch in range(100_000):
    model(torch.ones(2, 4))
    if batch == 3 and os.environ["RANK"] == "0":
        sys.stdout.write("training\n")
    time.sleep(0.01)
