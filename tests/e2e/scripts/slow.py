"""Three or more ranks that keep step with each other. One of them is slow in the way that --how says, or none is."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

USUAL_S, MORE_S = 0.05, 0.15


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(8, 8)
        self.takes_s = USUAL_S

    def forward(self, x):
        time.sleep(self.takes_s)
        return self.widen(x)


def load_batch(takes_s):
    time.sleep(takes_s)
    return torch.randn(4, 8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("constant", "sometimes", "loader", "none"), required=True)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
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
        block.takes_s = USUAL_S + (MORE_S * (1 if options.how == "constant" else 3) if me and slow else 0.0)
        model(x).sum().backward()
        if by_hand:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
