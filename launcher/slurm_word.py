"""Why SLURM ends a job: a launch hears SIGTERM and no more, so the head node asks. Never an error, never long."""

from __future__ import annotations

import re
import subprocess
import time
from typing import NamedTuple

from .cluster import Job

TIME_LIMIT = "SLURM: its time limit is reached"
_LIMIT_S = 5.0
_FIELD = re.compile(r"\b(RunTime|TimeLimit)=(\S+)")
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_GONE = ("down", "fail", "no_respond")


class SlurmWord(NamedTuple):
    """What SLURM says of a job that it ends."""

    reason: str = ""
    """"" where it does not say."""
    down_nodes: tuple[str, ...] = ()
    """Nodes of the job that it has lost."""


def ask_slurm(job: Job | None) -> SlurmWord:
    """What SLURM says of this job; nothing outside of a job, or where it cannot be asked."""
    if job is None or job.job_id is None or not job.hosts:
        return SlurmWord()
    down = down_nodes(_output("sinfo", "--noheader", "--Node", f"--nodes={','.join(job.hosts)}", "--format=%N %T"))
    if down:
        return SlurmWord("SLURM: a node of the job is down", tuple(down))
    said = _output("scontrol", "--oneliner", "show", "job", job.job_id)
    over = is_over_time(said) if said else job.ends is not None and time.time() >= job.ends
    return SlurmWord(TIME_LIMIT if over else "")


def down_nodes(sinfo: str) -> list[str]:
    """Nodes that are down or do not answer, of lines such as `gpu-2 down*`."""
    found = []
    for line in sinfo.splitlines():
        name, _, state = line.strip().partition(" ")
        if state.startswith(_GONE) or state.endswith("*"):
            found.append(name)
    return list(dict.fromkeys(found))  # a node has a line for each of its partitions


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
