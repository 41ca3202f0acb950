"""Two ranks, of which rank 1 never comes to a collective of a group with a short timeout."""

import argparse
import datetime
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=["default", "new group", "ddp"])
parser.add_argument("--timeout", type=int)
args = parser.parse_args()
short = datetime.timedelta(seconds=args.timeout)


def elsewhere():
    while True:
        time.sleep(0.1)


dist.init_process_group("gloo", timeout=None if args.how == "new group" else short)
group = dist.new_group([0, 1], timeout=short) if args.how == "new group" else None
rank = dist.get_rank()
model = nn.Linear(4, 2)
if args.how != "ddp":
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(1), group=group)
if rank == 1:
    elsewhere()
if args.how == "ddp":
    DistributedDataParallel(model)
dist.all_reduce(torch.ones(1), group=group)
