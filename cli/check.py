"""`gpuwatch check`: the preflight alone. The options are torchrun's own parser's: click hands them over untouched."""

from __future__ import annotations

import argparse

from .completion import handed_over


def _parser() -> argparse.ArgumentParser:
    from ..launcher.options import get_check_parser

    return get_check_parser()


@handed_over("check", _parser)
def command(arguments: tuple[str, ...]) -> int:
    """Test the ranks, GPUs, nodes and links of a job before it is run."""
    if "--slurm" in arguments:
        from .submit import submit

        return submit([argument for argument in arguments if argument != "--slurm"], "check")
    from ..launcher.launch_job import check

    return check(list(arguments))
