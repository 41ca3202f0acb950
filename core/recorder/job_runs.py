"""How the runs of a scheduler's job are named: the batch script names them, and who looks for them reads the names.

20261121-091533-slurm-17              job 17
20261121-092101-slurm-17-restart-1    the same job, after it was requeued once
20261121-091533-slurm-18_3            task 3 of array job 18
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_SCHEDULERS = ("slurm",)
_NAME = re.compile(
    rf"(?P<time>\d{{8}}-\d{{6}})-(?:{'|'.join(_SCHEDULERS)})-(?P<job>\d+(?:_\d+)?)"
    r"(?:-restart-(?P<restart>\d+))?(?:-(?P<again>\d+))?"
)


class JobRun(NamedTuple):
    """A run of a job. They sort by life, and within one by time."""

    restart: int
    time: str
    again: int
    """Counts runs of one name: a batch script with several."""
    job: str
    name: str


def job_run(name: str) -> JobRun | None:
    """What a run's name says; None for a run of no job."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return JobRun(int(match["restart"] or 0), match["time"], int(match["again"] or 1), match["job"], name)


def runs_of_job(names: Iterable[str], job: str, since: str = "") -> list[JobRun]:
    """The runs of one job, of each life the last one, the first life first.

    Numbers of jobs come again when a cluster is set up anew, so `since` (as in the names) leaves out what is older.
    """
    found = [run for run in map(job_run, names) if run is not None and run.job == job and run.time >= since]
    return list({run.restart: run for run in sorted(found)}.values())
