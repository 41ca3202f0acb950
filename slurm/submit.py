"""From a command line that was taken apart to a batch script, and from a job to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.errors import UsageError
from .command_line import Submission
from .render import RUNS_DIR, BatchScript, Option, directive
from .sbatch_options import OF_THE_SUBMISSION
from .scheduler import JobTask, Scheduler

_FIRST_LOOK_S = 1.0
_LATER_LOOKS_S = 10.0
_SLOWER = 1.2


def batch_script(
    submission: Submission, verb: Literal["launch", "check"], program: tuple[str, ...], bad_nodes: list[str]
) -> BatchScript:
    """What to render. A job is named after its script."""
    options = [option for option in submission.sbatch if option.name not in OF_THE_SUBMISSION]
    if bad_nodes:
        given = [option.value for option in options if option.name == "exclude" and option.value]
        options = [option for option in options if option.name != "exclude"]
        options.append(Option("exclude", ",".join(dict.fromkeys([*given, *bad_nodes]))))
    return BatchScript(
        verb,
        tuple(options),
        (*submission.launch, *submission.script),
        job_name=_job_name(submission, verb),
        program=program,
        runs_dir=submission.runs_dir or RUNS_DIR,
    )


def command_line_options(submission: Submission) -> list[str]:
    """What goes to sbatch itself."""
    return [
        f"--{option.name}" if option.value is None else f"--{option.name}={option.value}"
        for option in submission.sbatch
        if option.name in OF_THE_SUBMISSION
    ]


def _job_name(submission: Submission, verb: str) -> str:
    if verb == "check":
        return "gpuwatch-check"
    name = Path(submission.script[0]).stem if submission.script else ""
    try:
        directive(Option("job-name", name))
    except UsageError:  # a file's name may have two lines
        name = ""
    return name or "gpuwatch"


@dataclass
class Follower:
    """Looks at a job until it is over, and tells what changes."""

    scheduler: Scheduler
    say: Callable[[str], None]
    sleep: Callable[[float], None]

    def follow(self, job: str) -> list[JobTask]:
        """Its tasks as they ended. What SLURM has forgotten meanwhile is as it was seen last."""
        known: dict[str, JobTask] = {}
        pause_s, silent = _FIRST_LOOK_S, False
        while True:
            tasks = self.scheduler.tasks(job)
            if tasks is None:
                if not silent:
                    self.say(f"job {job}: SLURM does not answer; asking again")
                silent = True
            else:
                silent = False
                for task in tasks:
                    self._tell(known.get(task.id), task)
                    known[task.id] = task
                if all(task.over for task in tasks):
                    return [known[name] for name in sorted(known, key=_order)]
            self.sleep(pause_s)
            pause_s = min(_LATER_LOOKS_S, pause_s * _SLOWER)

    def _tell(self, before: JobTask | None, now: JobTask) -> None:
        if before is not None and before.state == now.state:
            return
        why = f" ({now.reason})" if now.reason not in ("", "None") else ""
        where = f" on {now.nodes}" if now.nodes and now.state == "RUNNING" else ""
        self.say(f"job {now.id}: {now.state.lower()}{where}{why}")


def _order(name: str) -> tuple[int, ...]:
    """`17_3` before `17_10`"""
    return tuple(int(part) for part in name.split("_") if part.isdigit())
