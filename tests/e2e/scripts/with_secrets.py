"""Has secrets among its arguments and variables, and overflows on rank 1 once it is let go on. Run under torchrun.

Rank 0 writes their digests to `told`. All ranks then wait for a file `go` beside it.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--token")
    parser.add_argument("--api-key")
    parser.add_argument("--data")
    parser.add_argument("--told", type=Path)
    return parser.parse_args()


def tell(path, *values):
    path.write_text(json.dumps([hashlib.sha256(value.encode()).hexdigest() for value in values]))


def train():
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    nn.init.constant_(model.module[0].weight, 2.0)  # 3e38 is finite in float32, and its sum is not
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(4):
        large = dist.get_rank() == 1 and batch == 2
        loss = model(torch.full((4, 8), 3e38 if large else 1.0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    args = parse()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        tell(args.told, args.token, args.api_key, args.data, os.environ["HF_TOKEN"], os.environ["TORCH_HUB_TOKEN"])
    while not args.told.with_name("go").exists():
        time.sleep(0.02)
    train()
    dist.destroy_process_group()
