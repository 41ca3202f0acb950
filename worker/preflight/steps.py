"""The steps of a preflight and their order. Pure.

A step is what the ranks do between two meetings. A stage, which the user sees, has one or more steps:

    quick   arrive, consistency, health, allocation, then the group over all ranks
    full    arrive, consistency, health, allocation, compute, node group, heads, cross group, bandwidth

If the group over all ranks fails and no rank is clearly to blame, `inside` tests the group of each node (unless that
was done before). Then pairs of nodes are tried: `pairs 1`, `pairs 2`, ...
"""

from __future__ import annotations

from typing import Literal

Mode = Literal["full", "quick"]

_LOCAL = ("arrive", "consistency", "health", "allocation")
_STAGE_OF = {"heads": "cross group", "inside": "node group"}


def stage_of(step: str) -> str:
    """The stage that a step belongs to.

    >>> stage_of("pairs 2")
    'cross group'
    """
    return "cross group" if step.startswith("pairs ") else _STAGE_OF.get(step, step)


def steps_of(mode: Mode, num_nodes: int) -> list[str]:
    """All steps of a preflight in which nothing goes wrong."""
    group = ["node group"] if num_nodes == 1 else ["cross group"]
    if mode == "quick":
        return [*_LOCAL, *group]
    return [*_LOCAL, "compute", "node group", *([] if num_nodes == 1 else ["heads", "cross group"]), "bandwidth"]


def step_after(step: str, mode: Mode, num_nodes: int) -> str:
    """The next step of a preflight in which nothing goes wrong; "" after the last one.

    >>> step_after("allocation", "quick", 2)
    'cross group'
    """
    steps = steps_of(mode, num_nodes)
    return dict(zip(steps, [*steps[1:], ""], strict=True))[step]


def is_local(step: str) -> bool:
    """Whether each rank does the step alone. A failure of one rank then does not block the others."""
    return step in ("consistency", "health", "allocation", "compute")


def stays_local(step: str, following: str) -> bool:
    """Whether each rank does both the step and the one after it alone."""
    return is_local(step) and is_local(following)
