"""Rank 1 raises, some collectives after its last forward. What the others then do is another story each."""

import atexit
import gc
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([1, 2]) if how == "raises another" else None
first_two = dist.new_group([0, 1]) if how == "had left" else None
model = nn.Linear(8, 8)


def failing() -> OSError:
    return OSError("HTTPSConnectionPool: Read timed out.")


for _ in range(4):
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(torch.ones(8))
for _ in range(3):  # metrics
    dist.all_reduce(torch.ones(4))

if how in ("hides", "exits"):
    try:
        if rank == 1:
            raise failing()
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        print("the connection is gone:", error, flush=True)
        os._exit(1) if how == "hides" else sys.exit(1)
elif how == "is told":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if rank == 1:
        time.sleep(0.5)
        raise failing()
    while True:  # it works on
        time.sleep(0.05)
elif how == "raises another":
    if pair is not None and rank:
        for _ in range(5):
            dist.all_reduce(torch.ones(2), group=pair)
    if rank == 1:
        raise failing()
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        raise ArithmeticError("step 4 failed") from error
elif how == "fails later":
    if rank == 1:
        dist.all_reduce(torch.ones(2), async_op=True)
        atexit.register(time.sleep, 4)
        raise failing()
    if rank == 2:
        time.sleep(2)
        raise KeyError("another error")
    dist.all_reduce(torch.ones(2))
elif how == "had left":
    if rank == 2:
        del model
        gc.collect()
        dist.destroy_process_group()  # else torch aborts every second such end under load (pytorch/pytorch#179291)
        sys.exit(0)
    time.sleep(1)
    for _ in range(2):
        dist.all_reduce(torch.ones(4), group=first_two)
    if rank == 1:
        raise failing()
    dist.all_reduce(torch.ones(4), group=first_two)
