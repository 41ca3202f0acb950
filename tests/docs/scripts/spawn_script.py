"""Two ranks by torch.multiprocessing.spawn."""

import os
import runpy

import torch.multiprocessing


def rank(number: int) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    runpy.run_path("train.py")


if __name__ == "__main__":
    os.environ["MASTER_PORT"] = "29511"
    torch.multiprocessing.spawn(rank, nprocs=2)
