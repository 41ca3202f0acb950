"""`gpuwatch submit`: a launch as a job of SLURM. With `gpuwatch check --slurm`, the preflight is one."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Literal

import click

from ..collector.run_files import RunPaths
from ..collector.written_report import read_report
from ..core.codes import Code, coded
from ..core.errors import GpuwatchError, UsageError
from ..core.recorder.run_folder import runs_of_job
from ..core.secrets import masked_command
from ..launcher.saved_settings import saved_runs_dir
from ..slurm.sbatch import JobTask, LocalSlurm
from ..slurm.submission import (
    BatchScript,
    JobFollower,
    LaunchOptions,
    SbatchCommand,
    batch_script,
    command_line_options,
    render,
    take_apart,
)

Verb = Literal["launch", "check"]
_REPORT_WAIT_S = 30
"""A shared file system may show to this machine a little later what a node has written."""

HELP = """\
Usage: gpuwatch submit [OPTIONS] [OPTIONS OF SBATCH] [OPTIONS OF GPUWATCH LAUNCH] SCRIPT [ARGUMENTS]
       gpuwatch check --slurm [OPTIONS] [OPTIONS OF SBATCH] [OPTIONS OF GPUWATCH CHECK]

  Submits a job to SLURM that runs SCRIPT under `gpuwatch launch` on all of its nodes (or the preflight alone, under
  `gpuwatch check`). The job's exit code is gpuwatch's, and the report is in gpuwatch-runs/, in this folder.

  gpuwatch submit --nodes 2 --gpus-per-node 8 --time 4:00:00 --wait train.py --lr 1e-4

  Options of sbatch go to sbatch, all others to the launch. -t is sbatch's --time, -m is torchrun's --module. Write an
  option of your site as --name=value: it goes to sbatch, too.

Options:
  --print            Print the batch script and submit nothing. Without SCRIPT: the template, for sbatch alone.
  --wait, -W         Follow the job to its end, print its report, and exit with its exit code.
  --exclude-bad RUN  Leave out the nodes that the verdict of RUN blames (a folder, a name in gpuwatch-runs, `latest`,
                     or a job's number; without runs here, beside your last launch).
  --program COMMAND  What runs gpuwatch on the nodes (default: this installation).
  -h, --help         Show this message and exit.
"""


@click.command(
    name="submit",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def submit(arguments: tuple[str, ...]) -> int:
    """Submit a training script to SLURM."""
    return submit_job(list(arguments), "launch")


def submit_job(arguments: list[str], verb: Verb) -> int:
    """Render, show or submit, and follow. Returns the exit code."""
    from ..launcher.options import get_check_parser, get_parser

    parser = get_parser() if verb == "launch" else get_check_parser()
    submission = take_apart(arguments, options_of(parser))
    if submission.help:
        click.echo(HELP, nl=False)
        return 0
    if submission.print_only and verb == "launch" and not arguments_of(submission):
        click.echo(render(BatchScript()), nl=False)
        return 0
    _check(submission, verb)
    by_default = not submission.runs_dir
    submission.runs_dir = submission.runs_dir or saved_runs_dir()
    runs_dir = Path(submission.runs_dir)
    bad_nodes = [node for run in submission.exclude_bad for node in _bad_nodes(run, runs_dir, by_default)]
    script = render(batch_script(submission, verb, _program(submission), bad_nodes))
    if masked_command(arguments) != arguments:
        _say(
            "the batch script has a token, key or password as it was typed, because the job needs it, and SLURM keeps "
            "the script; a variable keeps it out: sbatch hands the variables of this shell on"
        )
    if submission.print_only:
        click.echo(script, nl=False)
        return 0
    slurm, options = LocalSlurm(), command_line_options(submission)
    if "--test-only" in options:
        click.echo(slurm.test(script, options))
        return 0
    started = time.strftime("%Y%m%d-%H%M%S", time.localtime(time.time() - 86400))  # clocks and zones differ
    job = slurm.submit(script, [option for option in options if option != "--parsable"])
    if "--parsable" in options:
        click.echo(job)
    else:
        _say(f"submitted job {job}; the report will be in {submission.runs_dir}")
    return _follow(slurm, job, submission, started) if submission.wait else 0


def arguments_of(submission: SbatchCommand) -> list[str]:
    """What the launch gets."""
    return [*submission.launch, *submission.script]


def options_of(parser: argparse.ArgumentParser) -> LaunchOptions:
    """What a parser of the launcher takes."""
    names = [(name, action.nargs != 0) for action in parser._actions for name in action.option_strings]
    with_value = frozenset(name for name, takes_value in names if takes_value)
    return LaunchOptions(with_value, frozenset(name for name, _ in names) - with_value)


def _check(submission: SbatchCommand, verb: Verb) -> None:
    """What would only be found wrong once the job runs, hours later."""
    from ..launcher.expect import expect_script
    from ..launcher.options import parse_check, parse_launch

    if verb == "launch" and not submission.script:
        raise UsageError(Code.NO_SCRIPT, "expected a script to run, found none: gpuwatch submit [options] train.py")
    parse = parse_launch if verb == "launch" else parse_check  # with the variables: sbatch hands them on
    args = parse(arguments_of(submission))
    if verb == "launch" and submission.value("chdir") is None:  # relative to a folder that may be on the nodes only
        expect_script(args)


def _program(submission: SbatchCommand) -> tuple[str, ...]:
    """This installation: the nodes see the same file system, and maybe not the same PATH."""
    if submission.program is not None:
        try:
            words = shlex.split(submission.program)
        except ValueError:
            words = []
        if not words:
            raise UsageError(Code.WRONG_VALUE, f"--program: expected a command, found {submission.program!r}")
        return tuple(words)
    beside = Path(sys.executable).parent / "gpuwatch"
    return (str(beside),) if os.access(beside, os.X_OK) else (sys.executable, "-m", "gpuwatch.cli.main")


def _bad_nodes(run: str, runs_dir: Path, by_default: bool) -> list[str]:
    from .run_names import find_run_or_last

    path = find_run_or_last(run, runs_dir, by_default=by_default)
    if path.is_file():
        raise UsageError(
            Code.NO_STORE, f"--exclude-bad: expected a run's folder, found the spool file {path} of one node"
        )
    nodes = read_report(RunPaths(path)).verdict.bad_nodes
    _say(f"leaving out {', '.join(nodes)}" if nodes else f"the verdict of {path.name} blames no node: none is left out")
    return nodes


def _follow(slurm: LocalSlurm, job: str, submission: SbatchCommand, started: str) -> int:
    try:
        tasks = JobFollower(slurm, _say, time.sleep).follow(job)
        return max((_conclude(task, submission, started) for task in tasks), default=1)
    except KeyboardInterrupt:
        _say(f"job {job} keeps running; to end it: scancel {job}")
        return 130


def _conclude(task: JobTask, submission: SbatchCommand, started: str) -> int:
    """Print the report of a job that is over; its exit code is SLURM's, or the run's where SLURM has ended the job."""
    paths = _run_of(task, Path(submission.runs_dir or "."), started)
    if paths is None:
        text = f"job {task.id} ended as {task.state.lower()} and left no report; see its output"
        _say(coded(text, Code.SCHEDULER_SILENT))
        return task.exit_code or int(task.state != "COMPLETED")
    from ..collector.report.one_screen import screen_text

    last_words = f"report: {paths.report_json}\nas a page: {paths.report_html}"
    try:
        text = screen_text(read_report(paths), last_words=last_words)
    except GpuwatchError:
        text = f"{paths.report_text.read_text()}\n{last_words}"
    click.echo(text)
    return task.exit_code if task.state in ("COMPLETED", "FAILED") else int(paths.exit_code.read_text())


def _run_of(task: JobTask, runs_dir: Path, started: str) -> RunPaths | None:
    """The folder of its last life, once the report is in it; None if none comes."""
    for _ in range(_REPORT_WAIT_S):
        runs = runs_of_job((path.name for path in runs_dir.glob("*-slurm-*")), task.id, started)
        found = RunPaths(runs_dir.absolute() / runs[-1].name) if runs else None
        if found is not None and found.exit_code.exists():
            return found
        if found is None and not task.nodes:
            return None  # it has never run
        time.sleep(1.0)
    return None


def _say(text: str) -> None:
    click.echo(f"gpuwatch: {text}", err=True)
