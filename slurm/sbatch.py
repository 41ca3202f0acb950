"""SLURM's commands: sbatch and squeue."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from ..core.codes import Code
from ..core.errors import UsageError

# ruff: noqa: SIM905  # a page of quoted names reads worse

OVER = frozenset(
    """
    BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED SPECIAL_EXIT
    TIMEOUT
    """.split()
)
"""States that a job does not leave. A requeued one is PENDING again, and so never in one of these meanwhile."""


class JobTask(NamedTuple):
    """A job, or one task of an array."""

    id: str
    """`17`, `17_3`"""
    state: str
    """As squeue writes it: RUNNING."""
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    """128 + N if signal N has ended it."""

    @property
    def over(self) -> bool:
        """It will not run any more."""
        return self.state in OVER


_SEPARATOR = "|"
_FIELDS = ("JobArrayID", "State", "exit_code", "NodeList", "Reason")
_ANSWER_S = 60.0
_UNKNOWN_JOB = "Invalid job id"


class LocalSlurm:
    """The SLURM of this machine: it takes a job, and says how its tasks are."""

    def __init__(self) -> None:
        self._cluster: list[str] = []

    def submit(self, script: str, options: list[str]) -> str:
        """Hand a script to `sbatch --parsable`, which prints `17` or `17;cluster`. Returns the job's id."""
        job, _, cluster = _sbatch(script, ["--parsable", *options]).stdout.strip().partition(";")
        self._cluster = [f"--clusters={cluster}"] if cluster else []
        return job

    def test(self, script: str, options: list[str]) -> str:
        """What `sbatch --test-only` says."""
        done = _sbatch(script, options)
        return (done.stdout + done.stderr).strip()

    def tasks(self, job: str) -> list[JobTask] | None:
        """How they are; [] if SLURM knows no such job any more, None if it does not answer now.

        `squeue` forgets a job some minutes after its end (MinJobAge).
        """
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


def _sbatch(script: str, options: list[str]) -> subprocess.CompletedProcess[str]:
    """Raises UsageError when sbatch does not take the job."""
    done = _run(["sbatch", *options], script)
    if done.returncode:
        raise UsageError(Code.SUBMISSION_REFUSED, f"sbatch rejected the job: {_said(done.stderr)}")
    return done


def _run(command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            Code.SUBMISSION_REFUSED,
            f"expected SLURM's {command[0]} on this machine, found none; run this where jobs are submitted, or print "
            "the script and submit it there: gpuwatch submit --print",
        ) from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} does not answer within {_ANSWER_S:.0f} s")


def _said(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines) or "it printed no reason"


# sbatch's own options: which take a value. From the manual pages of SLURM 20.11 to 26.05.
#
# Names are enough: what a value means is for sbatch to say. An option that is not here (of a plugin of the site, or of
# a later release) passes, too, when it is written as --name=value.


WITH_VALUE = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment constraint container
    container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
    gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority profile qos
    reservation resources segment signal sockets-per-node switches tasks-per-node thread-spec threads-per-core time
    time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap
    """.split()
)

WITHOUT_VALUE = frozenset(
    """
    consolidate-segments contiguous external hold ignore-pbs no-requeue overcommit oversubscribe parsable
    quiet reboot spread-job spread-segments stepmgr test-only usage use-min-nodes verbose
    """.split()
)

WITH_OR_WITHOUT = frozenset("exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports".split())
"""Only as --name=value, or --name alone."""

SHORT = {
    word[0]: word[2:]
    for word in """
    A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error F=nodefile
    G=gpus H=hold i=input J=job-name k=no-kill L=licenses M=clusters N=nodes n=ntasks O=overcommit o=output
    p=partition Q=quiet q=qos S=core-spec s=oversubscribe t=time v=verbose w=nodelist x=exclude
    """.split()
}
"""Without -m, which is torchrun's here (the script is a module), and -W, which is --wait."""

OF_THE_SUBMISSION = frozenset({"clusters", "cluster", "M", "parsable", "quiet", "test-only", "usage", "verbose"})
"""What they change is sbatch's own doing, so they stand on its command line and not in the script."""

REFUSED = {
    **dict.fromkeys(
        "ntasks ntasks-per-node tasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket".split(),
        "gpuwatch starts the ranks of a node itself, as one task of SLURM; for the number of ranks: --nproc-per-node N",
    ),
    "wrap": "write the script after the options",
    "usage": "all options: gpuwatch submit --help",
}
"""What makes no sense here, and what to do in its place."""
