"""Fails in its first attempt, ends well in the second."""

import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
nn.Linear(2, 2)(torch.ones(1, 2))
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    raise RuntimeError("the first attempt fails")
dist.barrier()
print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} rank {dist.get_rank()} done", flush=True)
dist.barrier()  # gloo may abort the process when its peer has left before it
dist.destroy_process_group()
