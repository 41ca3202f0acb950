"""Which errors of gpuwatch itself may have cost a frame: one not recorded may be bad, or may be the maker. Pure."""

from __future__ import annotations

_HARMLESS = frozenset(
    (
        "preflight",
        "hooks",
        "names of torch",
        "device note",
        "native frame writer",
        "stacks",
        "collectives",
        "step times",
        "history",
        "forecasts",
        "hottest modules",
    )
)
"""Parts whose faults cost no frame. `hooks`, `names of torch`, `device note` and `native frame writer` are notes about
how frames are read and written. Without `stacks` or `collectives` a hang is told with less. The last four are the node
agent's: they look back at frames that it has."""


def costs_frames(part: str) -> bool:
    """Whether frames may be missing after a fault of this part.

    >>> costs_frames("forward hook"), costs_frames("stacks")
    (True, False)
    """
    return part not in _HARMLESS
