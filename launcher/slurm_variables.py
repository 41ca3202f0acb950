"""SLURM: how its environment describes a job, and how to ask it why it ends one.

What a user writes for sbatch is in the folder slurm/; nothing else of gpuwatch knows SLURM's words.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import time
from collections.abc import Mapping

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.wire.batch_job import SchedulerJob
from .option_types import is_number
from .scheduler_job import BatchScheduler, EndReason, JobVariable, SchedulerFacts, nodes, read_facts, whole

# SLURM's short form of host names, written out: without `scontrol`, which a container rarely has.

_ENTRY = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST = 1 << 16
"""SLURM's own limit of a range. A longer list is no node list of a job."""


def expand_nodelist(text: str) -> list[str]:
    """Host names in the order of the list, which is that of SLURM_NODEID. Raises UsageError on any other text.

    `gpu-[008-010,12],login1` is gpu-008, gpu-009, gpu-010, gpu-12, login1: a number has as many digits as the first
    of its range is written with. `r[1-2]n[1-2]` is r1n1, r1n2, r2n1, r2n2.
    """
    entries = _ENTRY.findall(text)
    if not entries or _ENTRY.sub("", text).strip(", \t\n"):
        raise _not_a_nodelist(text)
    hosts: list[str] = []
    for entry in entries:
        literals, ranges = _BRACKET.split(entry)[::2], _BRACKET.split(entry)[1::2]
        numbers = [_numbers(inside, text) for inside in ranges]
        if len(hosts) + math.prod(len(choices) for choices in numbers) > _MOST:
            raise _too_long(text)
        for chosen in itertools.product(*numbers):
            hosts.append(literals[0] + "".join(map(str.__add__, chosen, literals[1:])))
    return hosts


def _numbers(inside: str, text: str) -> list[str]:
    """`001-003,7`: 001, 002, 003, 7"""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or len(part) > 40:
            raise _not_a_nodelist(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _not_a_nodelist(text)
        if len(found) + int(last) - int(first) >= _MOST:
            raise _too_long(text)
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


def _not_a_nodelist(text: str) -> UsageError:
    return UsageError(
        Code.WRONG_VALUE, f"expected a SLURM node list such as gpu-[001-003,7],login1, found {text[:200]!r}"
    )


def _too_long(text: str) -> UsageError:
    return UsageError(
        Code.WRONG_VALUE, f"expected a SLURM node list of at most {_MOST} hosts, found more in {text[:200]!r}"
    )


PORTS = range(20000, 29000)
"""Where the rendezvous of a job is: below the ports that Linux hands out, and apart from torchrun's defaults."""
TIME_LIMIT = "SLURM: the job has reached its time limit"

_STEPS_OF_A_JOB = 1 << 20
"""SLURM numbers the batch script, the interactive shell and the like as steps from far above."""
_LIMIT_S = 5.0
_FIELD = re.compile(r"\b(RunTime|TimeLimit|Reason)=(\S+)")
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_GONE = ("down", "fail", "no_respond")


# -- the environment ----------------------------------------------------------------------------------------------


def _tasks(text: str) -> int:
    """`8(x2),4`: at most 8 on a node"""
    counts = [re.fullmatch(r"([0-9]+)(\(x[0-9]+\))?", part) for part in text.split(",")]
    if None in counts:
        raise ValueError
    return max(int(count[1]) for count in counts if count)


def _gpus(text: str) -> int | None:
    """`8`, `h100:8` or `h100:4,a100:4`. None for what else it may be: the next variable will tell."""
    counts = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(map(int, counts)) if all(map(is_number, counts)) else None


def _devices(text: str) -> int:
    """How many devices CUDA takes from a list: those before the first that is none."""
    devices = [device.strip() for device in text.split(",")]
    return len(list(itertools.takewhile(lambda device: device and not device.startswith("-"), devices)))


_VARIABLES = {
    "job_id": whole(("SLURM_JOB_ID", "SLURM_JOBID")),
    "restart": whole(("SLURM_RESTART_COUNT",)),
    "array": whole(("SLURM_ARRAY_JOB_ID",)),
    "array_task": whole(("SLURM_ARRAY_TASK_ID",)),
    "step": whole(("SLURM_STEP_ID", "SLURM_STEPID")),
    "nodes": nodes(("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    "hosts": JobVariable(
        ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        lambda text: tuple(expand_nodelist(text)),
        "a SLURM node list such as gpu-[001-003,7]",
    ),
    "node_rank": whole(("SLURM_NODEID",)),
    "node": JobVariable(("SLURMD_NODENAME",)),
    "gpus": JobVariable(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), _gpus),
    "visible_gpus": JobVariable(("CUDA_VISIBLE_DEVICES",), _devices, may_be_empty=True),
    "tasks_per_node": JobVariable(
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), _tasks, "numbers of tasks such as 1(x2)"
    ),
    "tasks_here": JobVariable(("SLURM_GTIDS",), lambda text: len(text.split(","))),
    "ends": whole(("SLURM_JOB_END_TIME",)),
}


def read_slurm_job(environ: Mapping[str, str]) -> SchedulerFacts:
    """The job that SLURM's variables describe. Raises UsageError on a senseless value."""
    facts = read_facts(_VARIABLES, environ)
    step, hosts, rank, node = (facts[name] for name in ("step", "hosts", "node_rank", "node"))
    # a job that was submitted from inside another one's step inherits the variables of that step
    inherits = hosts and rank is not None and node is not None and node not in hosts[rank : rank + 1]
    in_step = step is not None and step < _STEPS_OF_A_JOB and not inherits
    if not in_step:
        outside = {name: value for name, value in environ.items() if not name.startswith("SLURM_STEP")}
        facts = read_facts(_VARIABLES, outside)
    hosts = facts["hosts"] or ()
    restart = facts["restart"] or 0
    number = step if in_step else None
    array, task = facts["array"], facts["array_task"]
    nproc = _processes(facts["gpus"], facts["visible_gpus"])
    return SchedulerFacts(
        SLURM,
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
        tasks_here=(facts["tasks_here"] or facts["tasks_per_node"] or 1) if in_step else 1,
        array_task=f"{array}_{task}" if array is not None and task is not None else "",
        restart=restart,
    )


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


# -- why it ends a job --------------------------------------------------------------------------------------------


def why_it_ends(job: SchedulerFacts) -> EndReason:
    """SLURM's reason for ending a job; empty if SLURM cannot be asked. The launch itself gets only a SIGTERM."""
    if job.job_id is None or not job.hosts:
        return EndReason()
    down = down_nodes(_output("sinfo", "--noheader", "--Node", f"--nodes={','.join(job.hosts)}", "--format=%N %T"))
    said = _output("scontrol", "--oneliner", "show", "job", job.job_id)
    if down or has_lost_a_node(said):
        return EndReason("SLURM: a node of the job is down", tuple(down), "sinfo" if down else "scontrol")
    over = is_over_time(said) if said else job.ends is not None and time.time() >= job.ends
    return EndReason(TIME_LIMIT if over else "")


def down_nodes(sinfo: str) -> list[str]:
    """Nodes that are down or do not answer, of lines such as `gpu-2 down*`."""
    states = (line.strip().partition(" ")[::2] for line in sinfo.splitlines())
    found = [name for name, state in states if state.startswith(_GONE) or state.endswith("*")]
    return list(dict.fromkeys(found))  # a node has a line for each of its partitions


def has_lost_a_node(job: str) -> bool:
    """Whether SLURM ends a job for a node, which may be up again by now: `JobState=COMPLETING Reason=NodeDown`."""
    return dict(_FIELD.findall(job)).get("Reason") == "NodeDown"


def is_over_time(job: str) -> bool:
    """Whether a job has run as long as it may: `RunTime=00:01:01 TimeLimit=00:01:00`."""
    clocks = dict(_FIELD.findall(job))
    ran, limit = _seconds(clocks.get("RunTime", "")), _seconds(clocks.get("TimeLimit", ""))
    return ran is not None and limit is not None and ran >= limit


def _seconds(clock: str) -> int | None:
    """`1-02:03:04`, `02:03:04`, `03:04`; None for UNLIMITED."""
    match = _CLOCK.fullmatch(clock)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):  # a container rarely has SLURM's commands
        return ""


SLURM = BatchScheduler(
    words=SchedulerJob(
        "SLURM",
        job="",
        drain="scontrol update nodename={nodes} state=drain reason={reason}",
        exclude="--exclude={nodes}",
        daemon="slurmd",
    ),
    variables=_VARIABLES,
    read=read_slurm_job,
    why_it_ends=why_it_ends,
    on_each_node="srun --ntasks={nodes} --ntasks-per-node=1",
    signals_by="slurmstepd",
)
