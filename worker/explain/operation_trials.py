"""Runs an operation that made a bad value again, alone and on its own operands: as it was, and in other dtypes.

What is finite in float64 was too large for its dtype. What is not finite there either was handed numbers outside of the
operation's domain: its operands may have become so in an earlier operation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils import _pytree

from ...core.events.alarm_evidence import NOTHING, BadOperation, CauseTrial
from ...core.signal_errors import from_outside
from ..record.bad_elements import first_of
from .operands import numbers_of

MOST_BYTES = 1 << 28
"""Of all operands together, in the widest dtype that is tried. A larger operation is not tried."""
_OF_16_BITS = (torch.float16, torch.bfloat16)


def operands_with(args: Any, kwargs: Any, before: dict[int, torch.Tensor]) -> tuple[Any, Any]:
    """The arguments of an operation as it was handed them. `before`: id of a tensor that it wrote -> a copy of what
    that held."""

    def as_it_was(leaf: Any) -> Any:
        return before.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

    return _pytree.tree_map(as_it_was, args), _pytree.tree_map(as_it_was, kwargs)


def with_trials(found: BadOperation, output: torch.Tensor, func: Any, args: Any, kwargs: Any) -> BadOperation:
    """An operation with what it was handed for its first bad element, and its trials. May raise MemoryError."""
    handed = handed_for_first(func, args, kwargs, output)
    return replace(found, handed=handed, trials=trials_of(func, args, kwargs, output.dtype))


def trials_of(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> list[CauseTrial]:
    """Run the operation as it was, and in other dtypes than `dtype`, which its result had. Waits for the device.

    [] for an operation that draws random numbers, or that is not torch's own. `args` and `kwargs` are not changed.
    """
    is_own = func.namespace not in ("aten", "prims")  # the code of an extension: it may do more than compute
    if is_own or torch.Tag.nondeterministic_seeded in func.tags or not dtype.is_floating_point:
        return []
    leaves = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if sum(leaf.numel() for leaf in leaves) * 8 > MOST_BYTES:
        return [CauseTrial("operation", "float64", note="its operands are too large to be tried")]
    tried = [None, *([torch.float32] if dtype in _OF_16_BITS else [])]
    tried += [torch.bfloat16] if dtype is torch.float16 else []
    return [_trial(func, args, kwargs, each) for each in (*tried, torch.float64)]


def _trial(func: Any, args: Any, kwargs: Any, dtype: torch.dtype | None) -> CauseTrial:
    """`dtype`: None leaves all as it was."""
    changed = NOTHING if dtype is None else str(dtype).removeprefix("torch.")

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            is_number = leaf.dtype.is_floating_point and dtype is not None
            return leaf.detach().to(dtype if is_number else leaf.dtype, copy=True)
        is_dtype = isinstance(leaf, torch.dtype) and leaf.is_floating_point
        return dtype if is_dtype and dtype is not None else leaf

    try:
        result = func(*_pytree.tree_map(cast, args), **_pytree.tree_map(cast, kwargs))
    except Exception as error:
        if from_outside(error):
            raise
        what = str(error).partition("\n")[0][:120]
        return CauseTrial("operation", changed, note=f"it raised {type(error).__name__}: {what}")
    made = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return trial_of(made, "operation", changed)


def trial_of(tensors: list[torch.Tensor], of: str, changed: str) -> CauseTrial:
    """What a trial has returned: the worst value, or the largest abs max."""
    read = [found for found, _ in map(numbers_of, tensors) if found.value]
    bad = next((found.value for found in read if found.value != "finite"), "finite" if read else "")
    sizes = [found.abs_max for found in read if found.abs_max is not None]
    return CauseTrial(of, changed, bad, max(sizes, default=None) if bad == "finite" else None)


def handed_for_first(func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> list[float]:
    """What an operation that works element by element was handed for the first bad element of its output."""
    if torch.Tag.pointwise not in func.tags:
        return []
    index, found = first_of(output), []
    if index is None:
        return []
    names = [argument.name for argument in func._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            if value.dtype.is_complex or value.dim() > output.dim():
                return []
            try:
                number = value.detach().expand(output.shape)[tuple(index)].item()
            except RuntimeError as error:
                if from_outside(error):
                    raise
                return []
            found.append(float(number))
        elif isinstance(value, int | float) and not isinstance(value, bool) and (name, value) != ("alpha", 1):
            found.append(float(value))
    return found if all(map(math.isfinite, found)) else []
