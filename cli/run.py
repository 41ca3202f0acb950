"""`gpuwatch run`: the options are its own parser's, and the command's are its own: click hands all over untouched."""

from __future__ import annotations

from .completion import handed_over


@handed_over("run", "get_run_parser")
def command(arguments: tuple[str, ...]) -> int:
    """Run a command as it stands and watch what becomes a rank below it."""
    from ..launcher.run_job import run

    return run(list(arguments))
