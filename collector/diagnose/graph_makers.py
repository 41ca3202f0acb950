"""Which calls' operations can have made a bad gradient, from autograd's graph and the gradients above it.

The gradients of what modules returned are known: the bad one is the first of its page. An operation whose backward was
handed a finite gradient and only passes gradients on has made nothing. What is left, call by call, can have:

    x + f(norm(x))                 of x: `norm`. AddBackward0 passed on the gradient of what the block returned
    norm(x + f(x))                 of what f returned: `norm`. AddBackward0 passed on what it was handed
    h = x + f(norm(x)); h + g(h)   of x: `norm`. The first sum handed the same gradient to f, and f's was finite
    x * norm(x)                    of x: `norm`, if it is nan: a product with finite numbers makes none of a finite one
    x * exp(norm(x))               of x: `norm` or the block's own code
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


def makers_of(
    graph: Sequence[GraphNode], finite: Callable[[str, int], bool], returned_finite: Callable[[str], bool] | None = None
) -> Makers | None:
    """What can have made the gradient that the first node was handed; None if that is not known.

    `finite(module, outputs)`: whether the gradients of all that the module returned were seen, at least so many of
    them, and were finite. `returned_finite(module)`: whether all that it returned is known to be finite, asked where
    the gradient is nan alone.
    """
    outputs: dict[str, int] = {}
    for node in graph[1:]:
        if node.output:
            outputs[node.module] = outputs.get(node.module, 0) + 1
    if not graph or not all(finite(module, number) for module, number in outputs.items()):
        return None
    able: dict[tuple[str, int], list[GraphNode]] = {}
    passed: list[GraphNode] = []
    reached: set[int] = set()
    left = list(graph[0].users)
    while left:
        position = left.pop()
        if position in reached or not 0 < position < len(graph):
            continue
        reached.add(position)
        node = graph[position]
        passes = node.passes or _makes_no_nan(node, returned_finite)
        handed_finite = node.output or (node.passes and any(finite(module, 1) for module in node.operands))
        if passes and handed_finite:
            passed.append(node)
            continue
        left += node.users
        if not passes or not node.users:
            able.setdefault((node.module if node.call >= 0 else "", node.call), []).append(node)
    made = tuple(
        Maker(module, call, tuple(sorted({node.op for node in nodes})), any(node.opaque for node in nodes))
        for (module, call), nodes in sorted(able.items())
    )
    return Makers(made, tuple(passed))


def _makes_no_nan(node: GraphNode, returned_finite: Callable[[str], bool] | None) -> bool:
    """Whether it multiplies two tensors that are known to be finite."""
    return node.product and returned_finite is not None and all(map(returned_finite, node.operands))
