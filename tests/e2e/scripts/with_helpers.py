"""ddp_overflow.py whose ranks have helpers that import torch and call modules, before and after they do it."""

import subprocess
import sys

HELPER = "import torch; torch.nn.Linear(2, 2)(torch.ones(2, 2))"


def transform(x):
    import torch

    return torch.nn.Linear(2, 2)(torch.ones(2, 2)).sum().item()


if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", HELPER], check=True)

    import torch.distributed as dist
    from ddp_overflow import parse, train
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    subprocess.run([sys.executable, "-c", HELPER], check=True)
    list(DataLoader([1], num_workers=1, collate_fn=transform, multiprocessing_context="spawn"))
    train(parse())
