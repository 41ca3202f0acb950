"""`gpuwatch check`: the preflight alone. The options are torchrun's own parser's: click hands them over untouched."""

from __future__ import annotations

import argparse

import click

from .completion import ParsedByArgparse, complete_files


def _parser() -> argparse.ArgumentParser:
    from ..launcher.arguments.options import get_check_parser  # imports torch

    return get_check_parser()


@click.command(
    name="check",
    cls=ParsedByArgparse,
    parser=_parser,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def command(arguments: tuple[str, ...]) -> int:
    """Test the ranks, GPUs, nodes and links of a job before it is run."""
    if "--slurm" in arguments:
        from .submit import submit

        return submit([argument for argument in arguments if argument != "--slurm"], "check")
    from ..launcher.launch import check  # imports torch

    return check(list(arguments))
