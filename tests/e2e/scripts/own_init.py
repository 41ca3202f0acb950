"""ddp_overflow.py as a task of mpirun or srun: it reads its rank there, and meets the others in a file."""

import os
import sys

import torch.distributed as dist
from ddp_overflow import parse, train

store = sys.argv.pop(1)
mpi = "OMPI_COMM_WORLD_RANK" in os.environ
rank, size = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") if mpi else ("SLURM_PROCID", "SLURM_NTASKS")
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=int(os.environ[rank]), world_size=int(os.environ[size])
)
train(parse())
