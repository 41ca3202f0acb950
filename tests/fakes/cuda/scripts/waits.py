"""Two ranks over NCCL. Rank 1 does something else where rank 0 waits for its device, in one of the ways there are."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def main(way: str, other: str) -> None:
    """`way`: how rank 0 waits. `other`: what rank 1 does in place of the collective."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = torch.nn.Linear(8, 8).cuda()
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    tensor = torch.ones(8, device="cuda")
    for _ in range(3):  # what both do
        model(tensor).sum().backward()
        dist.all_reduce(tensor)
        tensor.zero_()
    print(f"rank {rank} sums {float(tensor.sum())}", flush=True)
    if rank == 1:
        if other == "sleep":
            time.sleep(3600)
        elif other == "leave":
            return
        elif other == "broadcast":
            dist.broadcast(tensor, 0)
            tensor.to("cpu")
        elif other == "stop":
            os.kill(os.getpid(), 19)
    if way == "recv":
        dist.recv(tensor, 1)
    elif way != "ddp":
        dist.all_reduce(tensor)
    waits(way, model, tensor)


def waits(way: str, model: torch.nn.Module, tensor: torch.Tensor) -> None:
    if way in ("to", "recv"):
        tensor.to("cpu")
    elif way == "bool":
        assert bool(tensor.any())
    elif way == "nonzero":
        torch.nonzero(tensor)
    elif way == "print":
        print(tensor)
    elif way == "float":
        float(tensor[0])
    elif way == "int":
        int(tensor[0])
    elif way == "if":
        if tensor[0] > 5:
            print("more")
    elif way == "event":
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    elif way in ("backward", "ddp"):
        model(tensor).sum().backward()
        torch.cuda.synchronize()


main(*sys.argv[1:])
