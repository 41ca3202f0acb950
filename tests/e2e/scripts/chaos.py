"""Trains under DDP at a steady pace and keeps every loss, bit for bit, in a file per rank; ends as its arguments say.

Every rank comes near an overflow in some batches, in another module each time, and writes into a second file in which:
events that are known.
"""

import argparse
import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class Peak(nn.Module):
    """Near overflow in one batch."""

    def forward(self, x, high):
        return torch.full((2,), 2.5e38 if high else 1.0)


class Widen(nn.Module):
    def forward(self, x, factor):
        return x * factor


class Deadly(nn.Module):
    def forward(self, x, now):
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Net(nn.Module):
    def __init__(self, peaks):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.widen = Widen()
        self.deadly = Deadly()
        self.head = nn.Linear(16, 1)
        self.peaks = nn.ModuleList(Peak() for _ in range(peaks))

    def forward(self, x, high, factor, dies):
        for number, peak in enumerate(self.peaks):
            peak(x, number == high)
        return self.head(torch.relu(self.deadly(self.widen(self.first(x), factor), dies)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds from one step to the next, at least")
    parser.add_argument("--peaks", type=int, default=0)
    parser.add_argument("--kind", choices=["clean", "overflow", "killed"], default="clean")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--batch", type=int, default=-1)
    parser.add_argument("--group-timeout", type=float, default=1800.0, metavar="SECONDS")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.group_timeout))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(args.peaks))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    torch.manual_seed(1 + rank)
    began = time.monotonic()
    with Path(f"losses-{rank}").open("w", buffering=1) as losses, Path(f"peaks-{rank}").open("w", buffering=1) as peaks:
        for batch in range(args.steps):
            time.sleep(max(0.0, began + batch * args.pace - time.monotonic()))
            here = rank == args.rank and batch == args.batch
            x = torch.rand(4, 8)
            factor = 1e39 if here and args.kind == "overflow" else 1.0
            high = peak_of(rank, batch, args.steps, args.peaks)
            if high >= 0:
                peaks.write(f"peaks.{high} {batch}\n")
            loss = model(x, high, factor, here and args.kind == "killed").square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.write(f"{batch} {loss.item().hex()}\n")
    del (
        model,
        optimizer,
        loss,
    )  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
    gc.collect()
    dist.destroy_process_group()


def peak_of(rank, batch, steps, peaks):
    """The module that comes near overflow in this batch of this rank; -1 for none, as in all uneven batches."""
    every = steps // (2 * peaks) * 2 if peaks else 0
    return batch // every if every and batch % every == 2 * rank and batch // every < peaks else -1


if __name__ == "__main__":
    main()
