"""What SLURM puts into the environment of a task: the second node of two."""

from __future__ import annotations

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu-[007-008]",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu-008",
    "SLURM_GPUS_ON_NODE": "8",
}
