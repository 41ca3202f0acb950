"""Rank 1 takes memory until there is none, in batch 2: sys.argv[1] is "loader" if a worker of its DataLoader does."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


def eat():
    held = []
    while dist.get_rank() == 1 and dist.get_world_size() == 2:
        held.append(torch.ones(16 << 20))


class Hungry(nn.Module):
    hungry = False

    def forward(self, x):
        if self.hungry:
            eat()
        return x


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            eat()
        return torch.ones(2)


def main():
    in_loader = "loader" in sys.argv[1:]
    dist.init_process_group("gloo")
    net = Hungry()
    samples = DataLoader(Samples(), num_workers=1) if in_loader else [torch.ones(2)] * 4
    for batch, x in enumerate(samples):
        net.hungry = batch == 2 and not in_loader
        net(x)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
