"""What an operation of torch is handed, and what it writes: its tensors, its numbers, and their description."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree

from ...core.events.read_tensors import OperandNumbers
from ...core.frames import RowKind
from ...core.values import Value, name_of
from ..device.device import without_modes
from ..record.plain_tensor import unwrapped
from ..record.tensor_stats import measure

BATCH_NORM = "batch_norm"


def numbers_of(tensor: torch.Tensor) -> tuple[OperandNumbers, int]:
    """(the description of a tensor, its flags). Waits for a device."""
    found = without_modes(measure, unwrapped(tensor).detach())
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if found.content is not RowKind.MEASURED:
        return OperandNumbers(dtype, shape, None, ""), 0
    value = Value(*found[:3])
    flags = int(value.flags)
    return OperandNumbers(
        dtype, shape, None if flags else value.abs_max, name_of(value.flags) if flags else "finite"
    ), flags


def number_of(value: float) -> OperandNumbers:
    """The description of a number of Python's own."""
    if math.isfinite(value):
        return OperandNumbers("number", None, abs(value), "finite")
    return OperandNumbers("number", None, None, "nan" if math.isnan(value) else f"{value:+}")


def operation_name(func: Any) -> str:
    """`mul_` of `aten.mul_.Tensor`."""
    return str(func._schema.name.rpartition("::")[2])


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    found = []
    is_norm = BATCH_NORM in func._schema.name
    for position, argument in enumerate(func._schema.arguments):
        is_running = is_norm and argument.name.startswith("running_")  # native_batch_norm does not declare it
        if is_running or (argument.alias_info is not None and argument.alias_info.is_write):
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            found += [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def plain_numbers(args: Any, kwargs: Any) -> list[Any]:
    """Numbers of Python's own among the arguments."""
    return [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, int | float)]


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether its elements can be inf or nan."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
