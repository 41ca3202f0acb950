"""Trains a batch, goes on as another program (os.exec), and trains there, too. "bad": on nan. "joins": in a group."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn


def forward(x: torch.Tensor) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).sum().backward()
    optimizer.step()


def main() -> None:
    went_on = "GOES_ON" in os.environ
    with tempfile.TemporaryDirectory() as folder:
        if "joins" in sys.argv:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        forward(torch.full((2, 4), float("nan") if went_on and "bad" in sys.argv else 1.0))
        if "joins" in sys.argv:
            dist.destroy_process_group()
    if not went_on:
        os.environ["GOES_ON"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.stdout.write("went on\n")


main()
