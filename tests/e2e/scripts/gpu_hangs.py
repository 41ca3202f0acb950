"""The driver, which is the stand-in for NVML, hangs while the ranks train."""

import os
from pathlib import Path

import torch

if os.environ["RANK"] == "0":
    with Path(os.environ["STAND_IN_NVML"]).open("a") as told:
        told.write("* recovery_action hang\n")
torch.nn.Linear(2, 2)(torch.ones(2))
