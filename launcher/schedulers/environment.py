"""What the environment says of the job that a launch is part of: read and typed here, once, and nowhere else.

One table for each scheduler (slurm.py) and one for plain variables, as scripts around torchrun and Kubernetes manifests
set them. Of a step of two nodes, on the second of them:

    SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu-[007-008] SLURM_NODEID=1 SLURM_GPUS_ON_NODE=8 ...
    Job(scheduler=SLURM, nodes=(2, 2), node_rank=1, head="gpu-007", port=20422, rdzv_id="4711.0", nproc="8", ...)

Nothing is opened and no command is run: a scheduler's commands are not there in many a container.
"""

from __future__ import annotations

from collections.abc import Mapping

from .job import JobVariable, SchedulerFacts, nodes, port, read_facts, whole
from .mpi import read_mpi_job
from .slurm_variables import SLURM

_SCHEDULERS = (SLURM,)

_PLAIN = {
    "nodes": JobVariable(("NNODES",), nodes),
    "node_rank": JobVariable(("NODE_RANK",), whole),
    "head": JobVariable(("MASTER_ADDR",)),
    "port": JobVariable(("MASTER_PORT",), port),
    "nproc": JobVariable(("NPROC_PER_NODE",)),
}


def read_job(environ: Mapping[str, str]) -> SchedulerFacts | None:
    """The job that this process is part of; None if nothing speaks of one. Raises UsageError on a senseless value."""
    for scheduler in _SCHEDULERS:
        if any(environ.get(name, "").strip() for name in scheduler.variables["job_id"].names):
            return scheduler.read(environ)
    facts = read_facts(_PLAIN, environ)
    return SchedulerFacts(None, **facts) if any(value is not None for value in facts.values()) else None


def read_task(environ: Mapping[str, str]) -> SchedulerFacts | None:
    """The same for a command of which each task is one process: mpirun may run inside of a scheduler's job."""
    return read_mpi_job(environ) or read_job(environ)


def variables(job: SchedulerFacts, fact: str) -> str:
    """The names that a fact may have, for a sentence: `SLURM_STEP_NUM_NODES or SLURM_NNODES`."""
    return " or ".join((job.scheduler.variables if job.scheduler is not None else _PLAIN)[fact].names)
