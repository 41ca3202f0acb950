"""Two ranks that torch.multiprocessing.spawn starts; each prints what a preflight could have changed, then trains.

LATE=1: rank 1 comes once rank 0 has joined the script's own store, as an actor of a pool may.
"""

import hashlib
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_overflow import parse, train


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def sockets():
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("socket:") for link in links)


def tell(rank):
    state = [digest(torch.get_rng_state().tolist()), digest(random.getstate()), digest(sorted(os.environ.items()))]
    threads = [thread.name for thread in threading.enumerate()]
    tasks = len(list(Path("/proc/self/task").iterdir()))
    cuda = torch.cuda.is_initialized()
    sys.stdout.write(f"rank {rank} {state} {threads} {tasks} threads, {sockets()} sockets, CUDA {cuda}\n")  # in one
    sys.stdout.flush()


def work(rank, path, args):
    torch.manual_seed(rank)
    random.seed(rank)
    while rank and os.environ.get("LATE") and not Path(path).exists():
        time.sleep(0.05)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    tell(rank)
    train(args)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store", parse()), nprocs=2)
