"""`gpuwatch env`: the variables of the run that it is called in."""

from __future__ import annotations

import json
import shlex

import click

from ..core.errors import UsageError
from ..core.recorder.run_folder import JOIN_VARIABLE, env


@click.command(name="env")
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "json", "dotenv"]),
    default="shell",
    show_default=True,
    help="shell: export lines. dotenv: lines NAME=VALUE, as DeepSpeed's .deepspeed_env has them.",
)
def command(form: str) -> int:
    """Print the variables to hand on to ranks, where a launcher starts them in an environment of its own.

    To be called below `gpuwatch run`; with `--other-hosts` there, ranks of other hosts join.
    """
    variables = env()
    if not variables:
        raise UsageError(
            "expected to be called below gpuwatch run, found no run; for example: "
            "gpuwatch run --other-hosts -- sh -c 'gpuwatch env > run.env && ...'"
        )
    if form == "json":
        click.echo(json.dumps(variables, indent=2))
    else:
        for name, value in variables.items():
            click.echo(f"{name}={value}" if form == "dotenv" else f"export {name}={shlex.quote(value)}")
    if JOIN_VARIABLE not in variables:
        click.echo("gpuwatch: these serve on this host alone; for others: gpuwatch run --other-hosts", err=True)
    return 0
