"""Trains a small model on the CPU or on "cuda"; one rank's numbers become too large in one batch. Run under torchrun.

The same seed, the same data and the same arithmetic on both: the verdicts can be compared, and the weights bit by bit.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from ddp_overflow import Block
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.norm(self.block(x)))


def parser_of_training():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument(
        "--fault", choices=["none", "forward", "backward", "reduction", "optimizer", "hang"], default="none"
    )
    parser.add_argument("--wrap", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--own-stream", action="store_true", help="a graph is not captured on the warm-up's stream")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--step", choices=["sgd", "adamw"], default="sgd")
    return parser


def parse():
    return parser_of_training().parse_args()


def wrapped(net, how):
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    fully_shard(net.block)
    return fully_shard(net)


class Reduced(nn.Module):
    """Reduces what the block returns, in the middle of a forward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        found = self.block(x)
        dist.all_reduce(found)
        return found.sum().item()


def overflow_and_hang(block, inputs, rank, bad):
    """One rank overflows, and waits for a collective that no other rank joins."""
    if rank != bad:
        time.sleep(600)
    Reduced(block)(inputs * 3e37)


def train(args, rank, world_size):
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group(args.backend)
    torch.manual_seed(0)
    net = Net().to(device)
    model = wrapped(net, args.wrap) if world_size > 1 else net
    optimizer = (
        torch.optim.SGD(net.parameters(), lr=1e-3)
        if args.step == "sgd"
        else torch.optim.AdamW(net.parameters(), lr=1e-3)
    )
    for batch in range(args.batches):
        inputs = torch.rand(4, 8) + torch.arange(8.0)
        here = rank == args.rank and batch == args.batch
        if here and args.fault == "forward":
            inputs *= 3e37  # finite; twice that is not, in float32
        if batch == args.batch and args.fault == "hang":
            overflow_and_hang(net.block, inputs.to(device), rank, args.rank)
        loss = model(inputs.to(device)).pow(2).mean()
        if here and args.fault == "backward":
            loss = loss * 1e38 * 10
        optimizer.zero_grad()
        loss.backward()
        if batch == args.batch and args.fault == "optimizer":
            for group in optimizer.param_groups:
                group["lr"] = 3e38
            for weight in net.parameters():
                weight.grad.mul_(0).add_(100.0)
        optimizer.step()
        print(f"rank {rank} batch {batch} loss {loss.item()!r}\n", end="", flush=True)
    own = [getattr(weight.detach(), "_local_tensor", weight.detach()) for weight in net.parameters()]
    weights = b"".join(weight.cpu().numpy().tobytes() for weight in own)
    print(f"rank {rank} weights {hashlib.sha256(weights).hexdigest()[:16]}\n", end="", flush=True)
    if world_size > 1:
        del model, optimizer
        dist.destroy_process_group()


if __name__ == "__main__":
    train(parse(), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
