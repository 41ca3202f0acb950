"""`gpuwatch check`: the preflight alone. The options are torchrun's own parser's: click hands them over untouched."""

from __future__ import annotations

from .completion import handed_over


@handed_over("check", "get_check_parser")
def command(arguments: tuple[str, ...]) -> int:
    """Test the ranks, GPUs, nodes and links of a job before it is run."""
    if "--slurm" in arguments:
        from .submit import submit

        return submit([argument for argument in arguments if argument != "--slurm"], "check")
    from ..launcher.launch_job import check

    return check(list(arguments))
