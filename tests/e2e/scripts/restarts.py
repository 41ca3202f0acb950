"""Fails at once, in every attempt but the last. Only the last needs torch: the others cost as little as can be."""

import os
import sys

if os.environ["TORCHELASTIC_RESTART_COUNT"] != sys.argv[1]:
    sys.exit(7)
import torch

torch.nn.Linear(2, 2)(torch.ones(1, 2))
print("the last attempt", flush=True)
