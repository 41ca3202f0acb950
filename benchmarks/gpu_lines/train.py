"""A training script for the lines that launch one: fp16 autocast; from one batch on, a module overflows on one rank.

It runs on CUDA where there is one, else on the CPU; alone, under DDP, or under FSDP2.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_lines.model import SIZES, Net, overflow


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("alone", "ddp", "fsdp2"), default="alone")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--bad-batch", type=int, default=-1, help="-1: none")
    parser.add_argument("--bad-rank", type=int, default=0)
    parser.add_argument("--fused-scaler", action="store_true", help="a fused AdamW and a GradScaler")
    parser.add_argument("--processes", action="store_true", help="say how many processes compute on this rank's GPU")
    return parser.parse_args()


def processes_on(device: torch.device) -> int:
    """By NVML, so that process namespaces do not matter."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    finally:
        pynvml.nvmlShutdown()


def train(options: argparse.Namespace, device: torch.device, rank: int) -> None:
    torch.manual_seed(0)
    size = SIZES["tiny"]
    net = Net(size).to(device)
    model: torch.nn.Module = net
    if options.mode == "ddp":
        # each rank's own buffers: only one rank is to overflow
        model = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    elif options.mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=options.fused_scaler or None)
    scaler = torch.amp.GradScaler(device.type, enabled=options.fused_scaler)
    for batch in range(options.batches):
        if batch == options.bad_batch and rank == options.bad_rank:
            overflow(net)
        x = torch.randn(size.sequences, size.length, size.width).to(device)
        with torch.autocast(device.type, dtype=torch.float16):
            loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if options.processes and device.type == "cuda":
        print(f"processes on the GPU: {processes_on(device)}", flush=True)
    print(f"rank {rank} done, loss {loss.item():.4f}", flush=True)


def main() -> None:
    options = parse()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if options.mode != "alone":
        dist.init_process_group("nccl" if on_cuda else "gloo")
    train(options, device, int(os.environ.get("RANK", "0")))
    if options.mode != "alone":
        gc.collect()  # what still refers to the group may abort the process at its exit
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
