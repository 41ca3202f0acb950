"""`gpuwatch launch`: the options are torchrun's own parser's, so click hands them over untouched."""

from __future__ import annotations

import argparse

from .completion import handed_over


def _parser() -> argparse.ArgumentParser:
    from ..launcher.options import get_parser

    return get_parser()


@handed_over("launch", _parser)
def command(arguments: tuple[str, ...]) -> int:
    """Run a training script under torchrun's elastic agent."""
    from ..launcher.launch_job import launch

    return launch(list(arguments))
