"""MPI: what mpirun tells the processes that it starts. Nothing is asked of it.

It starts a task for each rank, and the tasks of one host share a parent. It fills one host after the other (`--map-by
slot`), unless it was told otherwise: then --node-rank says which host this is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from .job import JobVariable, SchedulerFacts, port, read_facts, whole

VARIABLES = {
    "size": JobVariable(("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"), whole),
    "rank": JobVariable(("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"), whole),
    "tasks_here": JobVariable(("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"), whole),
    "job_id": JobVariable(("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_KVS")),
    "head": JobVariable(("MASTER_ADDR",)),
    "port": JobVariable(("MASTER_PORT",), port),
}


def read_mpi_job(environ: Mapping[str, str]) -> SchedulerFacts | None:
    """The job that MPI's variables speak of; None if they speak of none. Raises UsageError on a senseless value."""
    if not any(environ.get(name, "").strip() for name in VARIABLES["tasks_here"].names):
        return None
    facts = read_facts(VARIABLES, environ)
    size, rank, here = facts["size"], facts["rank"], facts["tasks_here"]
    if not size or not here or rank is None:
        return None
    nodes = -(-size // here)
    return SchedulerFacts(
        None,
        nodes=(nodes, nodes),
        node_rank=rank // here,
        head=facts["head"],
        port=facts["port"],
        rdzv_id=facts["job_id"] or f"mpi.{os.getppid()}" if nodes == 1 else facts["job_id"],
        tasks_per_node=here,
        tasks_here=here,
    )
