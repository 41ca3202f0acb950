"""As a pytest that tests a training: two ranks that mp.spawn starts, then an inf in the parent itself."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Linear(2, 1)
    for _ in range(3):
        model(torch.ones(4, 2)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store",), nprocs=2)
    big = nn.Linear(2, 1)
    nn.init.constant_(big.weight, 3e38)
    try:
        big(torch.full((1, 2), 3e38))
    except Exception as error:
        print("the test has failed:", type(error).__name__)
        sys.exit(1)
