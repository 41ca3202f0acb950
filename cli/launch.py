"""`gpuwatch launch`: the options are torchrun's own parser's, so click hands them over untouched."""

from __future__ import annotations

import argparse

import click

from .completion import ParsedByArgparse, complete_files


def _parser() -> argparse.ArgumentParser:
    from ..launcher.arguments.options import get_parser  # imports torch

    return get_parser()


@click.command(
    name="launch",
    cls=ParsedByArgparse,
    parser=_parser,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def command(arguments: tuple[str, ...]) -> int:
    """Run a training script under torchrun's elastic agent."""
    from ..launcher.launch import launch  # imports torch

    return launch(list(arguments))
