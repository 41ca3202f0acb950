"""DDP. The data loader of one rank yields a nan."""

import torch
import torch.distributed as dist
from common import Net, run
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        sample = torch.full((8,), index / 16)
        if index == 13 and dist.get_rank() == 1:
            sample[5] = float("nan")  # in batches of 4 that is batch 3
        return sample


def main():
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for x in DataLoader(Samples(), batch_size=4):
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
