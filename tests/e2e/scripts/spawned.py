"""ddp_overflow.py in two processes that torch.multiprocessing.spawn starts: no variable tells them their ranks."""

import os
import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_overflow import parse, train


def work(rank, store, args):
    assert "RANK" not in os.environ
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(args)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store", parse()), nprocs=2)
