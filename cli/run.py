"""`gpuwatch run`: the options are its own parser's, and the command's are its own: click hands all over untouched."""

from __future__ import annotations

import argparse

import click

from .completion import ParsedByArgparse, complete_files


def _parser() -> argparse.ArgumentParser:
    from ..launcher.run.options import get_run_parser

    return get_run_parser()


@click.command(
    name="run",
    cls=ParsedByArgparse,
    parser=_parser,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def command(arguments: tuple[str, ...]) -> int:
    """Run a command as it stands and watch what becomes a rank below it."""
    from ..launcher.run.run import run

    return run(list(arguments))
