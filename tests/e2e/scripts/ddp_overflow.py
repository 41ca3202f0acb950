"""Trains under DDP; in one batch of one rank the numbers are too large for `block.widen`. Run under torchrun."""

import argparse
import gc

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.keep = nn.Linear(8, 8, bias=False)
        self.widen = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.keep.weight)
        nn.init.eye_(self.widen.weight)
        with torch.no_grad():
            self.widen.weight.mul_(2)

    def forward(self, x):
        return self.widen(self.keep(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.block(x))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--batches", type=int, default=6)
    return parser.parse_args()


def train(args):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in range(args.batches):
        inputs = torch.rand(4, 8)
        if dist.get_rank() == args.rank and batch == args.batch:
            inputs.fill_(3e38)  # finite; twice that is not, in float32
        loss = model(inputs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"batch {batch} loss {loss.item()}", flush=True)
    del (
        model,
        optimizer,
        loss,
    )  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(parse())
