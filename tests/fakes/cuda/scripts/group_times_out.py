"""Two ranks over NCCL, whose group has a short timeout: rank 1 is elsewhere, and rank 0 waits for it in sys.argv[1].

sys.argv[2] is the timeout in seconds.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def elsewhere():
    time.sleep(3600)


def main(way, timeout_s):
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
    model = torch.nn.Linear(8, 8).cuda()
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    x = torch.ones(8, 8, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
        dist.all_reduce(x)
        float(x.sum())
    if rank == 1:
        elsewhere()
    if way == "wait":
        dist.all_reduce(x, async_op=True).wait()
    elif way == "ddp":
        model(x).sum().backward()
    elif way == "reduce":
        dist.all_reduce(x)
    elif way == "barrier":
        dist.barrier()
    float(x.sum())
    print("rank 0 goes on", flush=True)


main(sys.argv[1], int(sys.argv[2]))
