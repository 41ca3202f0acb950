"""Makes its process group while one rank comes late, and fails in its first attempt. Says which of our keys are left.

python late_init.py LATE_RANK
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == int(sys.argv[1]):
    time.sleep(1.5)
dist.init_process_group("gloo")
nn.Linear(2, 2)(torch.ones(1, 2))
dist.barrier()
if rank == 0:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    keys = [key for key in store.list_keys() if "gpuwatch" in key]
    print(f"attempt {attempt} keys of gpuwatch {keys}", flush=True)
dist.barrier()
if attempt == 0 and rank == 1:
    raise RuntimeError("the first attempt fails")
dist.barrier()
print(f"attempt {attempt} rank {rank} done", flush=True)
dist.barrier()  # gloo may abort the process when its peer has left before it
dist.destroy_process_group()
