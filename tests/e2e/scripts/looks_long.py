"""Rank 1 overflows. Rank 0 fails once rank 1 runs its forward again, which takes until torchrun has heard of that."""

import os
import time
from pathlib import Path

import psutil
import torch
from torch import nn

RANK = int(os.environ["RANK"])
AGAIN, OTHER = Path("again"), Path("rank-0")
CALLS = []
TORCHRUN_LOOKS_S = 2.0
"""It looks ten times a second whether a rank has failed."""


class Bad(nn.Module):
    def forward(self, x):
        CALLS.append(x)
        if len(CALLS) == 2:
            AGAIN.touch()
            other = psutil.Process(int(OTHER.read_text()))
            while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
            time.sleep(TORCHRUN_LOOKS_S)
        return x * 1e30 * 1e30


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


if RANK == 0:
    OTHER.with_suffix(".new").write_text(str(os.getpid()))
    OTHER.with_suffix(".new").rename(OTHER)
    wait_for(AGAIN)
    raise SystemExit("rank 0 fails")
wait_for(OTHER)
nn.Sequential(nn.Linear(4, 4), Bad())(torch.ones(2, 4))
