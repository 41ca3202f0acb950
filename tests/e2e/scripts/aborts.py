"""Rank 1 is elsewhere, and a thread of a library aborts the ranks that wait for it: sys.argv[1] says in what.

NCCL's watchdog ends a process so: from a thread that has no Python, once the main thread has stood still for long.
"""

import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from standing_still import abort_when_still, wait_until_still
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STILL_S = 4.0
ASKED_S = 12.0
"""Until it is said that the rank stands still, where nothing aborts it."""


def elsewhere():
    time.sleep(3600)


def say_when_still(thread, seconds):
    wait_until_still(thread, seconds)
    print("stands still", flush=True)


def leave_or_wait(rank, how):
    if rank == 1:
        elsewhere()
    if how != "timeout":
        then, still_s = (say_when_still, ASKED_S) if how == "nothing" else (abort_when_still, STILL_S)
        threading.Thread(target=then, args=(threading.get_ident(), still_s), daemon=True).start()


def main(how):
    dist.init_process_group("gloo", timeout=timedelta(seconds=6 if how == "timeout" else 600))
    rank = dist.get_rank()
    if how == "constructor":
        leave_or_wait(rank, how)
    model = nn.Linear(8, 8)
    if how == "sizes":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif how != "functional":
        model = nn.parallel.DistributedDataParallel(model)
    for batch in range(6):
        if batch == 3 and how not in ("constructor", "sizes"):
            leave_or_wait(rank, how)
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        if how == "functional":
            functional.all_reduce(loss.detach(), "sum", dist.group.WORLD).item()
        if how == "sizes" and not (rank == 1 and batch == 3):
            model.weight.full_tensor()
    dist.destroy_process_group()


main(sys.argv[1])
