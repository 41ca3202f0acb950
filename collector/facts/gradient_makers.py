"""Which operations can have made a bad gradient, and how large a gradient they can make. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...core.events.looked_again import GraphNode
from ...core.frames import Frame, Row, RowKind

# Which calls' operations can have made a bad gradient, from autograd's graph and the gradients above it.
#
# The gradients of module outputs are known: the bad one is the first of its page. An operation whose backward received
# a finite gradient and only passes gradients on is ruled out. The remaining operations, by call, can have made it:
#
# x + f(norm(x))                 of x: `norm`. AddBackward0 passed on the gradient of what the block returned
# norm(x + f(x))                 of what f returned: `norm`. AddBackward0 passed on what it was handed
# h = x + f(norm(x)); h + g(h)   of x: `norm`. The first sum handed the same gradient to f, and f's was finite
# x * norm(x)                    of x: `norm`, if it is nan: a product with finite numbers makes none of a finite one
# x * exp(norm(x))               of x: `norm` or the block's own code


@dataclass(frozen=True)
class GradientMaker:
    """Operations of one call that can have made it."""

    module: str
    call: int
    """-1: of no call. They are the script's own."""
    ops: tuple[str, ...]
    opaque: bool
    """One of them is a torch.autograd.Function, in whose forward modules may have been called."""


@dataclass(frozen=True)
class GradientMakers:
    """Operations that can have made a bad gradient, and some that cannot."""

    makers: tuple[GradientMaker, ...]
    passed: tuple[GraphNode, ...]
    """Operations that have used the tensor, and that only passed on a finite gradient."""


def makers_of(
    graph: Sequence[GraphNode], finite: Callable[[str, int], bool], returned_finite: Callable[[str], bool] | None = None
) -> GradientMakers | None:
    """The operations that can have made the gradient that the first node received; None if that is unknown.

    `finite(module, outputs)`: whether the gradients of all outputs of the module, at least `outputs` of them, were seen
    and finite. `returned_finite(module)`: whether all outputs of the module are known to be finite; asked only if the
    gradient is nan.
    """
    outputs = Counter(node.module for node in graph[1:] if node.output)
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
        # it multiplies two tensors that are known to be finite: that makes no nan
        passes = node.passes or (
            node.product and returned_finite is not None and all(map(returned_finite, node.operands))
        )
        handed_finite = node.output or (node.passes and any(finite(module, 1) for module in node.operands))
        if passes and handed_finite:
            passed.append(node)
            continue
        left += node.users
        if not passes or not node.users:
            able.setdefault((node.module if node.call >= 0 else "", node.call), []).append(node)
    made = tuple(
        GradientMaker(module, call, tuple(sorted({node.op for node in nodes})), any(node.opaque for node in nodes))
        for (module, call), nodes in sorted(able.items())
    )
    return GradientMakers(made, tuple(passed))


# How large a gradient can be that a matrix product, a convolution or an embedding has made, from frames' numbers.
#
# y = x @ W.T      |grad x| <= rows of W * max |W| * max |grad y|
# |grad W| <= rows of x * max |x| * max |grad y|

_PRODUCTS = frozenset(("AddmmBackward0", "ConvolutionBackward0", "LinearBackward0", "MmBackward0", "ToCopyBackward0"))
_LOOKUPS = frozenset(("EmbeddingBackward0",))


def largest_gradient(call: Frame, ops: Iterable[str], gradients: list[Row], *, of_parameter: bool) -> float | None:
    """An upper bound of abs max of the gradient that a call makes of its input, or of its parameter; None if unknown.

    `ops` are its operations in autograd's graph, `gradients` those of what it returned.
    """
    used = frozenset(ops)
    handed = _largest(gradients)
    rows = [math.prod(row.shape[:-1]) for row in call.outputs if row.shape]
    if handed is None or not rows:
        return None
    if of_parameter and used <= _LOOKUPS:
        return max(rows) * handed
    if not used <= _PRODUCTS:
        return None
    if of_parameter:
        given = _largest([row for row in call.inputs if row.kind == RowKind.MEASURED])
        is_known = given is not None and "ConvolutionBackward0" not in used
        return max(rows) * handed * max(given or 0.0, 1.0) if is_known else None
    weight = _largest(call.weights)
    shapes = [row.shape for row in call.weights if row.shape and len(row.shape) > 1]
    if weight is None or not shapes:
        return None
    return max(max(shape) if len(shape) == 2 else math.prod(shape) for shape in shapes) * weight * handed


def _largest(rows: list[Row]) -> float | None:
    """abs max of all of these tensors; None if one is unknown or not finite, or if there is none."""
    known = [row.abs_max for row in rows if row.finite and row.abs_max is not None]
    return max(known) if known and len(known) == len(rows) else None
