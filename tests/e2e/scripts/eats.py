"""Rank 1 takes memory until there is none, in batch 2."""

import torch
import torch.distributed as dist
from torch import nn


class Hungry(nn.Module):
    def forward(self, x):
        held = []
        while dist.get_rank() == 1 and dist.get_world_size() == 2 and self.hungry:
            held.append(torch.ones(16 << 20))
        return x


def main():
    dist.init_process_group("gloo")
    net = Hungry()
    for batch in range(4):
        net.hungry = batch == 2
        net(torch.ones(2))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
