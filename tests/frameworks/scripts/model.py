"""What all of these scripts train, and where its numbers become too large: `block.widen`, on one rank in one batch."""

import argparse
import os
import sys

import torch
from ddp_overflow import Block, Net

__all__ = ("BACKENDS", "BATCHES", "Block", "Net", "batches", "device_of", "parse", "say")
BATCHES = 4
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def parse():
    """`rank` that overflows, -1 for none; `ranks`, for a script that starts them itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--local_rank", "--local-rank", default="")  # DeepSpeed gives it to its scripts
    parser.add_argument("--how", default="", help="what else the script is to be told")
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu")
    return parser.parse_args()


def device_of(args):
    """This rank's own, which becomes the current one."""
    if args.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def say(text):
    """One line, in one write: ranks print at the same time."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def batches(rank, bad_rank, size=4):
    """The batches of one rank; those of different ranks differ."""
    generator = torch.Generator().manual_seed(rank)
    for number in range(BATCHES):
        inputs = torch.rand(size, 8, generator=generator)
        if (rank, number) == (bad_rank, 2):
            inputs.fill_(3e38)  # finite; twice that is not, in float32
        yield inputs
