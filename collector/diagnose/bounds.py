"""How large a gradient can be that a matrix product, a convolution or an embedding has made, from frames' numbers.

y = x @ W.T      |grad x| <= rows of W * max |W| * max |grad y|
                 |grad W| <= rows of x * max |x| * max |grad y|
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...core.frames import Frame, Row

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
        given = _largest([row for row in call.inputs if row.kind == "measured"])
        return (
            max(rows) * handed * max(given, 1.0) if given is not None and "ConvolutionBackward0" not in used else None
        )
    weight = _largest(call.weights)
    shapes = [row.shape for row in call.weights if row.shape and len(row.shape) > 1]
    if weight is None or not shapes:
        return None
    return max(max(shape) if len(shape) == 2 else math.prod(shape) for shape in shapes) * weight * handed


def _largest(rows: list[Row]) -> float | None:
    """abs max of all of these tensors; None if one is unknown or not finite, or if there is none."""
    known = [row.abs_max for row in rows if row.finite and row.abs_max is not None]
    return max(known) if known and len(known) == len(rows) else None
