"""SLURM's commands: sbatch and squeue."""

from __future__ import annotations

import subprocess

from ..core.errors import UsageError
from .scheduler import JobTask

_SEPARATOR = "|"
_FIELDS = ("JobArrayID", "State", "exit_code", "NodeList", "Reason")
_ANSWER_S = 60.0
_UNKNOWN_JOB = "Invalid job id"


class Slurm:
    """The SLURM of this machine. See scheduler.Scheduler."""

    def __init__(self) -> None:
        self._cluster: list[str] = []

    def submit(self, script: str, options: list[str]) -> str:
        """By `sbatch --parsable`, which prints `17` or `17;cluster`."""
        done = _run(["sbatch", "--parsable", *options], script)
        if done.returncode:
            raise UsageError(f"sbatch does not take the job: {_said(done.stderr)}")
        job, _, cluster = done.stdout.strip().partition(";")
        self._cluster = [f"--clusters={cluster}"] if cluster else []
        return job

    def test(self, script: str, options: list[str]) -> str:
        """What `sbatch --test-only` says."""
        done = _run(["sbatch", *options], script)
        if done.returncode:
            raise UsageError(f"sbatch does not take the job: {_said(done.stderr)}")
        return (done.stdout + done.stderr).strip()

    def tasks(self, job: str) -> list[JobTask] | None:
        """By `squeue`, which forgets a job some minutes after its end (MinJobAge)."""
        form = ",".join(f"{field}:.{_SEPARATOR}" for field in _FIELDS)
        done = _run(
            ["squeue", *self._cluster, "--noheader", "--array", "--states=all", f"--jobs={job}", f"--Format={form}"]
        )
        if done.returncode:
            return [] if _UNKNOWN_JOB in done.stderr else None
        return read_tasks(done.stdout)


def read_tasks(text: str) -> list[JobTask]:
    """`17_3|FAILED|1024|gpu-[1-2]|NonZeroExitCode|`"""
    tasks = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(_SEPARATOR)]
        if len(fields) >= len(_FIELDS):
            job, state, code, nodes, reason = fields[: len(_FIELDS)]
            tasks.append(JobTask(job, state, reason, nodes, exit_code_of(code)))
    return tasks


def exit_code_of(text: str) -> int:
    """`1024` as wait() has it, or `4:0`. A signal counts as in a shell."""
    code, colon, signal = text.partition(":")
    if not code.isdigit() or (colon and not signal.isdigit()):
        return 0
    exit_code, number = (int(code), int(signal)) if colon else (int(code) >> 8, int(code) & 0x7F)
    return 128 + number if number else exit_code


def _run(command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"expected SLURM's {command[0]} on this machine, found none; run this where jobs are submitted, or take "
            "the script elsewhere: gpuwatch submit --print"
        ) from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} does not answer within {_ANSWER_S:.0f} s")


def _said(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines) or "it says nothing"
