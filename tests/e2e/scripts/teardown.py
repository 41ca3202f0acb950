"""Rank 1 ends by itself, and its teardown lasts until torchrun stops it: sys.argv[1] says how.

Rank 0 loses its peer, and an abort ends it as it exits, as torch 2.13 ends some processes of gloo
(pytorch/pytorch#179291).
"""

import atexit
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn


def take_down():
    dist.destroy_process_group()
    threading.Event().wait()


def end(how):
    if how == "exits":
        atexit.register(take_down)
        sys.exit("loss is nan")
    try:
        if how == "exits in try":
            sys.exit("loss is nan")
        raise OSError("HTTPSConnectionPool: Read timed out.")
    finally:
        take_down()


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(8, 8)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        dist.all_reduce(torch.ones(8))
    if dist.get_rank() == 1:
        end(sys.argv[1])
    atexit.register(os.abort)
    dist.all_reduce(torch.ones(4))


main()
