"""The facts of the job that a launch is part of, and the description of a scheduler that the launch needs to find them.

Each scheduler has one file, such as slurm_variables.py. The rest of gpuwatch uses only its `BatchScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.recorder.run_folder import new_name_in_job
from ..core.wire.batch_job import SchedulerJob
from .option_types import is_number, is_port, parse_nnodes


@dataclass(frozen=True)
class JobVariable:
    """A fact of the environment: the names that it may have, the best one first, and how it is written."""

    names: tuple[str, ...]
    parse: Callable[[str], Any] = str
    """Raises ValueError or UsageError for what it cannot be."""
    what: str = ""
    """Expected, for a sentence."""
    is_right: Callable[[str], bool] = bool
    may_be_empty: bool = False
    """Empty is a value; else it is as good as unset."""


whole = partial(JobVariable, parse=int, what="a whole number", is_right=is_number)
port = partial(JobVariable, parse=int, what="a port from 1 to 65535", is_right=is_port)
nodes = partial(JobVariable, parse=parse_nnodes, what="a number of nodes or MIN:MAX")


@dataclass(frozen=True)
class EndReason:
    """Why a scheduler ends a job."""

    reason: str = ""
    """"" where it does not say."""
    down_nodes: tuple[str, ...] = ()
    """Nodes of the job that it has lost."""
    told_by: str = ""
    """The command that reported them."""


@dataclass(frozen=True)
class BatchScheduler:
    """A batch scheduler: its words, and what only it can tell."""

    words: SchedulerJob
    """The part of a job's facts that all its jobs share, for the collector."""
    variables: Mapping[str, JobVariable]
    """Fact -> the environment's variables for it. Every job of the scheduler has `job_id`."""
    read: Callable[[Mapping[str, str]], SchedulerFacts]
    """The job that an environment describes. Raises UsageError on a senseless value."""
    why_it_ends: Callable[[SchedulerFacts], EndReason]
    """Asks it; never raises, and takes seconds at most."""
    on_each_node: str
    """How a command is started once on each of `{nodes}` nodes."""
    signals_by: str = ""
    """The name of the process that signals all of a step."""


@dataclass(frozen=True)
class SchedulerFacts:
    """The facts of the job; None is unknown."""

    scheduler: BatchScheduler | None
    """None: plain variables describe the job."""
    nodes: tuple[int, int] | None = None
    """Fewest and most."""
    node_rank: int | None = None
    head: str | None = None
    """The name of the first node, where the nodes meet."""
    port: int | None = None
    """The rendezvous' port there; the next one is the collector's."""
    rdzv_id: str | None = None
    nproc: str | None = None
    """Processes on this node, as --nproc-per-node takes them."""
    job_id: str | None = None
    node: str | None = None
    """What the scheduler calls this node."""
    hosts: tuple[str, ...] = ()
    """The nodes by node rank."""
    in_step: bool = True
    """One launch is started on each node. Not so in a batch script, which runs on the first node alone."""
    tasks_per_node: int = 1
    """The most on any node."""
    ends: int | None = None
    """When the time limit is reached, in seconds since 1970."""
    tasks_here: int = 1
    """How many tasks run on this node."""
    array_task: str = ""
    """`18_3`: what users call the job, if it is a task of an array."""
    restart: int = 0
    """How often the job was requeued."""

    @property
    def name(self) -> str:
        """`SLURM job 17`, for a sentence."""
        return f"{self.scheduler.words.scheduler} job {self.job_id}" if self.scheduler is not None else "this job"

    @property
    def new_run_name(self) -> str:
        """That of a run to which nobody gave a name: it is found by the job's number; "" where there is none."""
        if self.scheduler is None or self.job_id is None:
            return ""
        return new_name_in_job(self.scheduler.words.scheduler, self.array_task or self.job_id, self.restart)

    @property
    def nnodes(self) -> str | None:
        """The nodes, as --nnodes takes them."""
        return ":".join(map(str, dict.fromkeys(self.nodes))) if self.nodes is not None else None

    @property
    def on_the_wire(self) -> SchedulerJob | None:
        """The job's facts for the collector; None where no scheduler runs it."""
        if self.scheduler is None or self.job_id is None:
            return None
        return replace(self.scheduler.words, job=self.job_id, node=self.node or "", nodes=list(self.hosts))


def read_facts(table: Mapping[str, JobVariable], environ: Mapping[str, str]) -> dict[str, Any]:
    """Each fact of a table, None where no variable has it."""
    facts: dict[str, Any] = dict.fromkeys(table)
    for fact, variable in table.items():
        for name in variable.names:
            text = environ.get(name, "").strip()
            if not text and not (variable.may_be_empty and name in environ):
                continue
            try:
                if text and not variable.is_right(text):
                    raise ValueError
                facts[fact] = variable.parse(text)
            except (ValueError, UsageError) as error:
                raise UsageError(Code.WRONG_VALUE, f"{name}: expected {variable.what}, found {text[:80]!r}") from error
            if facts[fact] is not None:
                break
    return facts
