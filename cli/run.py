"""`gpuwatch run`: the options are its own parser's, and the command's are its own: click hands all over untouched."""

from __future__ import annotations

import argparse

from .completion import handed_over


def _parser() -> argparse.ArgumentParser:
    from ..launcher.options import get_run_parser

    return get_run_parser()


@handed_over("run", _parser)
def command(arguments: tuple[str, ...]) -> int:
    """Run a command as it stands and watch what becomes a rank below it."""
    from ..launcher.run_job import run

    return run(list(arguments))
