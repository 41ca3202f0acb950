"""`gpuwatch launch`, `run`, `check`, `env` and `collect`: what starts a job, and what its ranks and nodes need.

The options of the first three are those of argparse's parsers in launcher/options.py: click hands them over untouched.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.recorder.run_folder import JOIN_VARIABLE
from ..core.recorder.run_folder import env as env_of_run


class ParsedByArgparse(click.Command):
    """A command whose options are those of a parser of argparse's."""

    def __init__(self, *given: Any, parser: str, **more: Any) -> None:
        super().__init__(*given, **more)
        self._parser = parser

    def argparser(self) -> argparse.ArgumentParser:
        """What reads its options."""
        from ..launcher import options

        parser: argparse.ArgumentParser = getattr(options, self._parser)()
        return parser

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its options that begin so, as they are spelled with dashes."""
        known = {
            option: (action.help or "") % {**vars(action), "prog": ""}
            for action in self.argparser()._actions
            for option in action.option_strings[:1]
            if option.startswith("--")
        }
        return [CompletionItem(option, help=text) for option, text in known.items() if option.startswith(incomplete)]


def handed_over(name: str, parser: str) -> Callable[[Callable[[tuple[str, ...]], int]], click.Command]:
    """A command whose options are those of `parser` in launcher/options.py: click hands all that follows its name over
    untouched."""

    def decorate(function: Callable[[tuple[str, ...]], int]) -> click.Command:
        settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
        rest = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
        cls = ParsedByArgparse
        return click.command(name, cls, parser=parser, context_settings=settings, add_help_option=False)(rest(function))

    return decorate


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Behind an option that takes one of some words, these; else the shell's own names of files: a script."""
    before = ctx.params.get("arguments") or ("",)
    if before[-1].startswith("--") and isinstance(ctx.command, ParsedByArgparse):
        action = ctx.command.argparser()._option_string_actions.get(before[-1])
        if action is not None and action.choices is not None:
            return [CompletionItem(word) for word in action.choices if word.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file")]


@handed_over("launch", "get_parser")
def launch(arguments: tuple[str, ...]) -> int:
    """Run a training script under torchrun's elastic agent."""
    from ..launcher import launch_job

    return launch_job.launch(list(arguments))


@handed_over("run", "get_run_parser")
def run(arguments: tuple[str, ...]) -> int:
    """Run a command as it stands and watch what becomes a rank below it."""
    from ..launcher.run import run_job

    return run_job.run(list(arguments))


@handed_over("check", "get_check_parser")
def check(arguments: tuple[str, ...]) -> int:
    """Test the ranks, GPUs, nodes and links of a job before it is run."""
    if "--slurm" in arguments:
        from .submit import submit_job

        return submit_job([argument for argument in arguments if argument != "--slurm"], "check")
    from ..launcher import launch_job

    return launch_job.check(list(arguments))


@click.command(name="env")
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "json", "dotenv"]),
    default="shell",
    show_default=True,
    help="shell: export lines. dotenv: NAME=VALUE lines, as in DeepSpeed's .deepspeed_env.",
)
def env(form: str) -> int:
    """Print the variables that ranks need if a launcher starts them in an environment of its own.

    Call it below `gpuwatch run`; with `gpuwatch run --other-hosts`, ranks of other hosts can join.

    gpuwatch run --other-hosts -- sh -c 'gpuwatch env > run.env && ...'
    """
    variables = env_of_run()
    if not variables:
        raise UsageError(
            Code.NESTED_RUN,
            "expected a call below gpuwatch run, found no run; for example: "
            "gpuwatch run --other-hosts -- sh -c 'gpuwatch env > run.env && ...'",
        )
    if form == "json":
        click.echo(json.dumps(variables, indent=2))
    else:
        for name, value in variables.items():
            click.echo(f"{name}={value}" if form == "dotenv" else f"export {name}={shlex.quote(value)}")
    if JOIN_VARIABLE not in variables:
        click.echo("gpuwatch: these variables work on this host only; for others: gpuwatch run --other-hosts", err=True)
    return 0


def _metrics_address(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    from ..launcher.option_types import metrics_address

    try:
        return metrics_address(text) if text is not None else None
    except argparse.ArgumentTypeError as error:
        raise UsageError(Code.WRONG_VALUE, f"--metrics-port: {error}") from error


def _notify_targets(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    from ..launcher.option_types import notify_target, notify_targets

    try:
        return notify_targets([notify_target(text) for text in texts])
    except argparse.ArgumentTypeError as error:
        raise UsageError(Code.WRONG_VALUE, f"--notify: {error}") from error


@click.command(name="collect")
@click.option("--bind", default="tcp://*:29401", show_default=True, help="Where to listen: tcp://ADDRESS:PORT.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of the job.")
@click.option(
    "--rdzv-id", default="none", show_default=True, help="The job's rendezvous id, the same as in its launches."
)
@click.option("--secret-file", help="File with the job's shared secret (or the variable GPUWATCH_SECRET).")
@click.option("--runs-dir", default="gpuwatch-runs", show_default=True, help="Folder for the runs' folders.")
@click.option(
    "--max-frames",
    type=click.IntRange(min=1),
    default=21,
    show_default=True,
    help="Frames that the report shows for each rank.",
)
@click.option(
    "--metrics-port",
    metavar="[HOST:]PORT",
    callback=_metrics_address,
    help="Serve Prometheus metrics on this port of 127.0.0.1, or of HOST, another address of this host (0.0.0.0: "
    "all). Needs the extra `metrics`.",
)
@click.option(
    "--notify",
    metavar="URL|COMMAND",
    multiple=True,
    callback=_notify_targets,
    help="At the verdict, a stall and a forecast, post a small JSON to this address, or run this command with the JSON "
    "on its stdin. May be repeated (or the variable GPUWATCH_NOTIFY).",
)
def collect(
    bind: str,
    nodes: int,
    rdzv_id: str,
    secret_file: str | None,
    runs_dir: str,
    max_frames: int,
    metrics_port: str | None,
    notify: tuple[str, ...],
) -> int:
    """Wait for the node agents of one job, write its report, and exit with its exit code.

    Start the job's launches with --collector tcp://THIS_HOST:PORT and the same secret. Ctrl-C ends the collector early,
    with a report of what has arrived.

    gpuwatch collect --nodes 2 --rdzv-id 17 --secret-file secret
    """
    from ..collector.__main__ import collect as collect_by_hand
    from ..launcher.options import expect_known_variables
    from ..launcher.plan import job_secret

    expect_known_variables()
    if not bind.startswith("tcp://"):
        raise UsageError(Code.WRONG_VALUE, f"--bind: expected tcp://ADDRESS:PORT, found {bind!r}")
    secret = job_secret(secret_file, rdzv_id, local=False)
    return collect_by_hand(bind, nodes, rdzv_id, secret, Path(runs_dir), max_frames, metrics_port, notify, sys.stdout)
