"""Three or more ranks that keep step with each other. One of them is slow in the way that --how says, or none is."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

USUAL_S, MORE_S = 0.05, 0.15
USUAL_WORK, MORE_WORK = 40, 12
"""Multiplications of matrices in a forward: 1.3 times as many."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(8, 8)
        self.takes_s = USUAL_S
        self.work = 0
        self.matrix = torch.eye(256)

    def forward(self, x):
        time.sleep(self.takes_s)
        for _ in range(self.work):
            self.matrix = self.matrix @ self.matrix
        return self.widen(x)


def load_batch(takes_s):
    time.sleep(takes_s)
    return torch.randn(4, 8)


def all_agree(yes):
    """As rank 0 has it."""
    said = torch.tensor([int(yes)])
    dist.broadcast(said, src=0)
    return bool(said)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("constant", "sometimes", "loader", "none"), required=True)
    parser.add_argument("--works", action="store_true", help="a rank is slow by 1.3 times the work, and none sleeps")
    parser.add_argument("--usual", type=float, default=USUAL_S, help="seconds that any rank takes for a step")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--until", type=Path, help="ends early when this file is there")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    me = dist.get_rank() == options.rank
    block = Block()
    net = nn.Sequential(block, nn.Linear(8, 1))
    by_hand = options.how == "loader"
    model = net if by_hand else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for step in range(options.steps):
        x = load_batch(MORE_S if me and options.how == "loader" else 0.0)
        slow = options.how == "constant" or (options.how == "sometimes" and step % 4 == 3)
        block.takes_s = options.usual + (MORE_S * (1 if options.how == "constant" else 3) if me and slow else 0.0)
        if options.works:
            more = MORE_WORK * (1 if options.how == "constant" else 4)
            block.work, block.takes_s = USUAL_WORK + (more if me and slow else 0), 0.0
        model(x).sum().backward()
        if by_hand:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if options.until is not None and step % 8 == 7 and all_agree(options.until.exists()):
            break
    dist.barrier()
    dist.monitored_barrier()  # in this thread: gloo's own may abort the process (scripts/hang.py)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
