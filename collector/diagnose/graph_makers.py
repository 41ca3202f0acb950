"""Which calls' operations can have made a bad gradient, from autograd's graph and the gradients above it.

The gradients of what modules returned are known: the bad one is the first of its page. An operation whose backward was
handed a finite gradient and only passes gradients on has made nothing. What is left, call by call, can have:

    x + f(norm(x))                 of x: `norm`. AddBackward0 passed on the gradient of what the block returned
    norm(x + f(x))                 of what f returned: `norm`. AddBackward0 passed on what it was handed
    x * norm(x)                    of x: `norm` or the block's own code
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.records import GraphNode


@dataclass(frozen=True)
class Maker:
    """Operations of one call that can have made it."""

    module: str
    call: int
    """-1: of no call. They are the script's own."""
    ops: tuple[str, ...]
    opaque: bool
    """One of them is a torch.autograd.Function, in whose forward modules may have been called."""


@dataclass(frozen=True)
class Makers:
    """What can have made a bad gradient, and what cannot have."""

    makers: tuple[Maker, ...]
    passed: tuple[GraphNode, ...]
    """Operations that have used the tensor, and that only passed on a finite gradient."""


def makers_of(graph: Sequence[GraphNode], finite: Callable[[str, int], bool]) -> Makers | None:
    """What can have made the gradient that the first node was handed; None if that is not known.

    `finite(module, outputs)`: whether the gradients of all that the module returned were seen, at least so many of
    them, and were finite.
    """
    outputs: dict[str, int] = {}
    for node in graph[1:]:
        if node.output:
            outputs[node.module] = outputs.get(node.module, 0) + 1
    if not graph or not all(finite(module, number) for module, number in outputs.items()):
        return None
    able: dict[tuple[str, int], list[GraphNode]] = {}
    passed: list[GraphNode] = []
    for position in _reached(graph):
        node = graph[position]
        if not node.passes or not (node.output or node.users):
            able.setdefault((node.module if node.call >= 0 else "", node.call), []).append(node)
        elif node.output:
            passed.append(node)
    made = tuple(
        Maker(module, call, tuple(sorted({node.op for node in nodes})), any(node.opaque for node in nodes))
        for (module, call), nodes in able.items()
    )
    return Makers(made, tuple(passed))


def _reached(graph: Sequence[GraphNode]) -> list[int]:
    """The positions of all nodes above the first one, each once."""
    found: list[int] = []
    left = list(graph[0].users)
    while left:
        position = left.pop()
        if position not in found and 0 < position < len(graph):
            found.append(position)
            left += graph[position].users
    return sorted(found)
