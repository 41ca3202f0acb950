"""`gpuwatch launch`: the options are torchrun's own parser's, so click hands them over untouched."""

from __future__ import annotations

from .completion import handed_over


@handed_over("launch", "get_parser")
def command(arguments: tuple[str, ...]) -> int:
    """Run a training script under torchrun's elastic agent."""
    from ..launcher.launch_job import launch

    return launch(list(arguments))
