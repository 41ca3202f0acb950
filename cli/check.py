"""`gpuwatch check`: the preflight alone. The options are torchrun's own parser's: click hands them over untouched."""

from __future__ import annotations

import click


@click.command(
    name="check",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Test the ranks, GPUs, nodes and links of a job before it is run."""
    if "--slurm" in arguments:
        from .submit import submit

        return submit([argument for argument in arguments if argument != "--slurm"], "check")
    from ..launcher.launch import check  # imports torch

    return check(list(arguments))
