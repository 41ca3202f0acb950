"""Ranks over NCCL. Rank 1 does something else where the others wait for their devices, in one of the ways there are."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def main(way: str, other: str) -> None:
    """`way`: how the others wait. `other`: what rank 1 does in the meantime."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = torch.nn.Linear(8, 8).cuda()
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    elif way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    step = pipeline(model, rank) if way == "pipeline" else None
    group = dist.new_group()
    tensor = torch.ones(8, 8, device="cuda")
    for _ in range(3):  # what all of them do
        if step is not None:
            step()
        else:
            model(tensor).sum().backward()
        dist.all_reduce(tensor)
        tensor.zero_()
    print(f"rank {rank} has {float(tensor.sum())}", flush=True)
    if rank == 1:
        if other == "leave":
            return
        if other == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if other == "order":
            dist.all_reduce(tensor, group=group)
            tensor.to("cpu")
        time.sleep(3600)
    if way == "recv":
        dist.recv(tensor, 1)
    elif way not in ("ddp", "fsdp2", "pipeline"):
        dist.all_reduce(tensor)
    wait(way, model, tensor)
    if step is not None:
        step()
        torch.cuda.synchronize()


def pipeline(model: torch.nn.Module, rank: int):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    size = dist.get_world_size()
    stage = PipelineStage(model, rank, size, torch.device("cuda", rank))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).square().mean())

    def step() -> None:
        given = (torch.ones(8, 8, device="cuda"),) if rank == 0 else ()
        schedule.step(*given, target=torch.ones(8, 8, device="cuda") if rank == size - 1 else None)

    return step


def wait(way: str, model: torch.nn.Module, tensor: torch.Tensor) -> None:
    if way in ("to", "recv"):
        tensor.to("cpu")
    elif way == "bool":
        assert bool(tensor.any())
    elif way == "nonzero":
        torch.nonzero(tensor)
    elif way == "print":
        print(tensor)
    elif way == "float":
        float(tensor[0, 0])
    elif way == "int":
        int(tensor[0, 0])
    elif way == "if":
        if tensor[0, 0] > 5:
            print("more")
    elif way == "event":
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    elif way in ("backward", "ddp", "fsdp2"):
        model(tensor).sum().backward()
        torch.cuda.synchronize()


main(*sys.argv[1:])
