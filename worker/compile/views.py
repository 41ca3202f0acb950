"""What each version of torch lets us trace into the graphs of torch.compile.

Only code that is known to be harmless is traced:

            rows  gradients
    2.16                     not tried
    2.15    yes   yes        the hook of a gradient may not change an input of the graph, so it writes through `.data`
    2.13    yes   yes
    2.11    yes              such a hook ends a run with an activation that works in place, or with dynamic shapes
    2.8     yes              such a hook breaks the graph, unless autograd is compiled
    2.7                      an attribute of a tensor breaks the graph

tests/e2e/test_compiled_scripts.py runs the scripts that this table comes from, with the torch that is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.torch_names import GRADIENTS_SINCE, NEWEST, ROWS_SINCE, not_seen_of_compiled, release_of

_THROUGH_DATA_SINCE = (2, 15)


@dataclass(frozen=True)
class CompiledViews:
    """What hooks trace into a graph, and so see of its modules."""

    rows: bool
    """Inputs and outputs of modules."""
    gradients: bool
    """Gradients of outputs. Those of parameters are read outside of graphs."""
    through_data: bool
    """The hook of a gradient writes through `.data`."""
    missing: str
    """One sentence about what hooks do not see; empty if they see all."""


def compiled_views(version: str = torch.__version__) -> CompiledViews:
    """What hooks can see of compiled modules with this version of torch."""
    release = release_of(version) or (0, 0)
    rows = ROWS_SINCE <= release <= NEWEST
    lost = not_seen_of_compiled(release)
    missing = f"torch {release[0]}.{release[1]}: {lost}" if lost else ""
    return CompiledViews(rows, rows and release >= GRADIENTS_SINCE, rows and release >= _THROUGH_DATA_SINCE, missing)
