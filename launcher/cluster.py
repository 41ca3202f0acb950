"""What the environment says of the job that a launch is part of: read and typed here, once, and nowhere else.

One table for SLURM and one for plain variables, as scripts around torchrun and Kubernetes manifests set them. Of a
step of two nodes, on the second of them:

    SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu-[007-008] SLURM_NODEID=1 SLURM_GPUS_ON_NODE=8 ...
    Job(scheduler="slurm", nodes=(2, 2), node_rank=1, head="gpu-007", port=20422, rdzv_id="4711.0", nproc="8", ...)

Nothing is opened and no command is run: `scontrol` is not there in many a container.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..core.errors import UsageError
from .nodelist import expand_nodelist
from .plan import is_number, parse_nnodes

PORTS = range(20000, 29000)
"""Where the rendezvous of a SLURM job is: below the ports that Linux hands out, and apart from torchrun's defaults."""

_STEPS_OF_A_JOB = 1 << 20
"""SLURM numbers the batch script, the interactive shell and the like as steps from far above."""


@dataclass(frozen=True)
class Job:
    """What is known of the job; None is unknown."""

    scheduler: Literal["slurm", "plain"]
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
    """One launch is started on each node. Not so in SLURM's batch script, which runs on the first node alone."""
    tasks_per_node: int = 1
    """The most on any node."""
    ends: int | None = None
    """When the time limit is reached, in seconds since 1970."""


def read_job(environ: Mapping[str, str]) -> Job | None:
    """The job that this process is part of; None if nothing speaks of one. Raises UsageError on a senseless value."""
    if any(environ.get(name, "").strip() for name in _SLURM["job_id"].names):
        return _slurm_job(environ)
    facts = _read(_PLAIN, environ)
    return Job("plain", **facts) if any(value is not None for value in facts.values()) else None


def variables(job: Job, fact: str) -> str:
    """The names that a fact may have, for a sentence: `SLURM_STEP_NUM_NODES or SLURM_NNODES`."""
    return " or ".join((_SLURM if job.scheduler == "slurm" else _PLAIN)[fact].names)


# -- how each kind of value is written ----------------------------------------------------------------------------


def _whole(text: str) -> int:
    if not is_number(text):
        raise ValueError("a whole number")
    return int(text)


def _port(text: str) -> int:
    if not is_number(text) or not 0 < int(text) < 65536:
        raise ValueError("a port from 1 to 65535")
    return int(text)


def _nodes(text: str) -> tuple[int, int]:
    try:
        return parse_nnodes(text)
    except UsageError:
        raise ValueError("a number of nodes or MIN:MAX") from None


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return tuple(expand_nodelist(text))
    except UsageError:
        raise ValueError("a SLURM node list such as gpu-[001-003,7]") from None


def _tasks(text: str) -> int:
    """`8(x2),4`: at most 8 on a node"""
    counts = [re.fullmatch(r"([0-9]+)(\(x[0-9]+\))?", part) for part in text.split(",")]
    if None in counts:
        raise ValueError("numbers of tasks such as 1(x2)")
    return max(int(count[1]) for count in counts if count)


def _gpus(text: str) -> int | None:
    """`8`, `h100:8` or `h100:4,a100:4`. None for what else it may be: the next variable will tell."""
    counts = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(map(int, counts)) if all(map(is_number, counts)) else None


def _devices(text: str) -> int:
    """How many devices CUDA takes from a list: those before the first that is none."""
    count = 0
    for device in text.split(","):
        if not device.strip() or device.strip().startswith("-"):
            break
        count += 1
    return count


@dataclass(frozen=True)
class _Variable:
    """A fact of the environment: the names that it may have, the best one first, and how it is written."""

    names: tuple[str, ...]
    parse: Callable[[str], Any] = str
    may_be_empty: bool = False
    """Empty is a value; else it is as good as unset."""


_SLURM = {
    "job_id": _Variable(("SLURM_JOB_ID", "SLURM_JOBID"), _whole),
    "restart": _Variable(("SLURM_RESTART_COUNT",), _whole),
    "step": _Variable(("SLURM_STEP_ID", "SLURM_STEPID"), _whole),
    "nodes": _Variable(("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), _nodes),
    "hosts": _Variable(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"), _hosts),
    "node_rank": _Variable(("SLURM_NODEID",), _whole),
    "node": _Variable(("SLURMD_NODENAME",)),
    "gpus": _Variable(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), _gpus),
    "visible_gpus": _Variable(("CUDA_VISIBLE_DEVICES",), _devices, may_be_empty=True),
    "tasks_per_node": _Variable(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), _tasks),
    "ends": _Variable(("SLURM_JOB_END_TIME",), _whole),
}

_PLAIN = {
    "nodes": _Variable(("NNODES",), _nodes),
    "node_rank": _Variable(("NODE_RANK",), _whole),
    "head": _Variable(("MASTER_ADDR",)),
    "port": _Variable(("MASTER_PORT",), _port),
    "nproc": _Variable(("NPROC_PER_NODE",)),
}


def _slurm_job(environ: Mapping[str, str]) -> Job:
    facts = _read(_SLURM, environ)
    step = facts["step"]
    in_step = (
        step is not None
        and step < _STEPS_OF_A_JOB
        and _is_of_this_step(facts["hosts"], facts["node_rank"], facts["node"])
    )
    if not in_step:
        facts = _read(_SLURM, {name: value for name, value in environ.items() if not name.startswith("SLURM_STEP")})
    hosts = facts["hosts"] or ()
    restart = facts["restart"] or 0
    number = step if in_step else None
    nproc = _processes(facts["gpus"], facts["visible_gpus"])
    return Job(
        "slurm",
        nodes=facts["nodes"],
        node_rank=facts["node_rank"],
        head=hosts[0] if hosts else None,
        port=rendezvous_port(facts["job_id"], number or 0, restart),
        rdzv_id=f"{facts['job_id']}.{'batch' if number is None else number}" + (f".{restart}" if restart else ""),
        nproc=None if nproc is None else str(nproc),
        job_id=str(facts["job_id"]),
        node=facts["node"],
        hosts=hosts,
        in_step=in_step,
        tasks_per_node=(facts["tasks_per_node"] or 1) if in_step else 1,
        ends=facts["ends"],
    )


def _is_of_this_step(hosts: tuple[str, ...] | None, rank: int | None, node: str | None) -> bool:
    """A job that was submitted from inside another one's step inherits the variables of that step."""
    if not hosts or rank is None or node is None:
        return True
    return node in hosts[rank : rank + 1]


def _processes(gpus: int | None, visible: int | None) -> int | None:
    """One per GPU of this node; of those that the environment shows, if it hides some. None: ask the driver."""
    known = [count for count in (gpus, visible) if count is not None]
    return (min(known) or None) if gpus is not None else None


def rendezvous_port(job_id: int, step: int, restart: int = 0) -> int:
    """A port of its own for what may run on a node at the same time: jobs of near numbers, and steps of one job.

    Even, so that the next one is free for the collector.
    """
    pairs = len(PORTS) // 2
    return PORTS.start + 2 * ((job_id + 1009 * step + 2003 * restart) % pairs)


# -- reading ------------------------------------------------------------------------------------------------------


def _read(table: Mapping[str, _Variable], environ: Mapping[str, str]) -> dict[str, Any]:
    """Each fact of a table, None where no variable tells it."""
    facts: dict[str, Any] = dict.fromkeys(table)
    for fact, variable in table.items():
        for name in variable.names:
            text = environ.get(name, "").strip()
            if not text and not (variable.may_be_empty and name in environ):
                continue
            try:
                facts[fact] = variable.parse(text)
            except ValueError as error:
                raise UsageError(f"{name}: expected {error}, found {text[:80]!r}") from error
            if facts[fact] is not None:
                break
    return facts
