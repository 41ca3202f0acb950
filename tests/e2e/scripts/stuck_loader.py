"""A data loader's worker is stuck in its second item. Then its rank is killed."""

import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

HERE = Path("the worker is stuck")


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, item):
        if item == 1:  # who reads the output waits for all that hold it
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
        while item == 1:
            HERE.write_text(str(os.getpid()))
            time.sleep(0.1)
        return torch.ones(4)


if __name__ == "__main__":
    net = torch.nn.Linear(4, 4)
    for batch in DataLoader(Slow(), num_workers=1, batch_size=1, multiprocessing_context="fork"):
        net(batch)
        while not HERE.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
