"""What `gpuwatch run` hands to processes below it: variables that name its files, and those of its scratch folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..own_files import write_whole
from ..settings import WorkerSettings

RUN_VARIABLE = "GPUWATCH_RUN"
"""The scratch folder of the run. worker/path/sitecustomize.py, which may import nothing, has it by this name."""
JOIN_VARIABLE = "GPUWATCH_JOIN"
"""The file by which other hosts join the run (core/wire/keys.py). sitecustomize.py has it by this name, too."""
_SETTINGS = "settings.json"
_MEETING_KEY = "meeting.key"
_PROCESS = "process-{pid}.recorder"
PROCESSES = _PROCESS.format(pid="*")
LATER_PROGRAMS = _PROCESS.format(pid="*-*")
"""Recorders of processes that went on as another program (os.exec), which is watched again."""
RANKS = "rank-*.recorder"
_MOST_TEXT = 1000
_FAILED = "failed-{pid}"
_UNWATCHED = "unwatched-{pid}"
UNWATCHED = _UNWATCHED.format(pid="*")
"""Why a Python process could not be watched."""


def env() -> dict[str, str]:
    """What a launcher that starts ranks in an environment of its own is to give to them; {} outside of `gpuwatch run`.

        ray.init(runtime_env={"env_vars": gpuwatch.env()})

    The values are paths, and no secret. Ranks of other hosts join a run that was started with `--other-hosts`.
    """
    if not os.environ.get(RUN_VARIABLE):
        return {}
    names = (JOIN_VARIABLE, RUN_VARIABLE, "PYTHONPATH")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def write_settings(folder: Path, settings: WorkerSettings) -> None:
    """The settings of the ranks."""
    write_whole(folder / _SETTINGS, settings.to_json().encode())


def read_settings(folder: Path) -> WorkerSettings | None:
    """None if that run is over."""
    with suppress(OSError):
        return WorkerSettings.from_json((folder / _SETTINGS).read_bytes())
    return None


def write_meeting_key(folder: Path, key: str) -> None:
    """What the ranks seal their preflight's values with. The folder is private; no variable has it."""
    write_whole(folder / _MEETING_KEY, key.encode())


def read_meeting_key(folder: Path) -> str:
    """ "" for none: the folder could not be written, and the values are not sealed."""
    with suppress(OSError):
        return (folder / _MEETING_KEY).read_text()
    return ""


def tell_unwatched(folder: Path, pid: int, reason: str) -> None:
    """Why this process is not watched, for the report. The folder may be full, or gone."""
    with suppress(OSError):
        (folder / _UNWATCHED.format(pid=pid)).write_text(reason)


def error_text(error: BaseException) -> str:
    """`DistNetworkError: The server socket has failed to listen`: the first line of it."""
    try:
        message = str(error)
    except Exception:  # its __str__ raises
        message = ""
    return f"{type(error).__name__}: {(message.strip().splitlines() or [''])[0]}"[:_MOST_TEXT]


def tell_failed(folder: Path, pid: int, error: BaseException) -> None:
    """What a process has raised that is no rank: it may be why there is none. The folder may be full, or gone."""
    with suppress(OSError):
        (folder / _FAILED.format(pid=pid)).write_text(error_text(error), errors="replace")


def read_failed(folder: Path, pid: int) -> str:
    """The error of this process, else the latest of another; "" if no process reported one."""
    with suppress(OSError):
        own = folder / _FAILED.format(pid=pid)
        others = folder.glob(_FAILED.format(pid="*"))
        found = [own] if own.exists() else sorted(others, key=lambda path: path.stat().st_mtime_ns)[-1:]
        return found[0].read_text(errors="replace")[:_MOST_TEXT] if found else ""
    return ""


def process_file(pid: int, programs: int = 0) -> str:
    """Name of the recorder of a process that may become a rank, or not. `programs` had it before (os.exec)."""
    return _PROCESS.format(pid=f"{programs}-{pid}" if programs else pid)


def pid_of_file(path: Path) -> int:
    """Whose recorder it is, or whose reason."""
    return int(path.stem.rpartition("-")[2])


# How the runs of a scheduler's job are named: the batch script names them, and who looks for them reads the names.
#
# 20261121-091533-slurm-17              job 17
# 20261121-092101-slurm-17-restart-1    the same job, after it was requeued once
# 20261121-091533-slurm-18_3            task 3 of array job 18

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

    A cluster that is set up anew counts its jobs from the beginning again. So `since` (a time as in the names) leaves
    out older runs.
    """
    found = [run for run in map(job_run, names) if run is not None and run.job == job and run.time >= since]
    return list({run.restart: run for run in sorted(found)}.values())
