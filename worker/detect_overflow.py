"""`gpuwatch.detect_overflow(tensor, "after layer_norm")`: does this tensor hold nan or inf, now?"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ..core.frames import RowKind
from ..core.signal_errors import from_outside
from ..core.values import NonFinite, ValueEncoding
from .device.device import device_for, has_reader, without_modes
from .record.plain_tensor import to_plain, wait_for
from .record.tensor_stats import NOT_MEASURABLE, TensorStats, measure
from .watched_models import watching_hooks

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """A decorator: torch.compile breaks its graph at a call of this function, so that it runs on real tensors."""
    return cast("_Function", torch.compiler.disable(function))  # type: ignore[no-untyped-call]  # torch has no annotation


def look(tensor: torch.Tensor) -> TensorStats:
    """TensorStats of any tensor on any device: it waits for that, so the hooks do not use it. Never raises.

    Call it through `without_modes`.
    """
    if tensor.device.type in ("cpu", "meta"):
        return measure(tensor)
    if has_reader(tensor.device) and device_for(tensor.device).is_capturing():
        return NOT_MEASURABLE  # waiting for the device would break the user's capture
    try:
        return measure_with_one_wait(tensor)
    except Exception as error:  # this device does not support one of the operations
        if from_outside(error):
            raise
        return measure(tensor)


def measure_with_one_wait(tensor: torch.Tensor) -> TensorStats:
    """As `measure`, with one transfer to the host (two if there is a nan) and no temporary as large as the tensor."""
    wait_for(tensor)  # the script asks for its numbers now
    plain = to_plain(tensor)
    if plain is None:
        return NOT_MEASURABLE
    if plain.numel() == 0:
        return TensorStats(0, 0, 0, RowKind.EMPTY.number)
    if plain.dtype is torch.bool:
        plain = plain.view(torch.uint8)
    lowest, highest = torch.aminmax(plain)
    if not plain.dtype.is_floating_point:
        return _of_integers(plain, lowest, highest)
    low, high, least = torch.stack((lowest, highest, torch.linalg.vector_norm(plain, -math.inf))).tolist()
    flags = NonFinite.NONE
    if math.isnan(low) or math.isnan(high):
        flags |= NonFinite.NAN
        has_posinf, has_neginf = torch.stack((torch.isposinf(plain).any(), torch.isneginf(plain).any())).tolist()
    else:
        has_posinf, has_neginf = high == math.inf, low == -math.inf
    flags |= (NonFinite.POSINF if has_posinf else 0) | (NonFinite.NEGINF if has_neginf else 0)
    largest = math.nan if flags & NonFinite.NAN else max(abs(low), abs(high))
    return TensorStats(_bits(least), _bits(largest), int(flags) | ValueEncoding.FLOAT64 << 8, RowKind.MEASURED.number)


def _of_integers(plain: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> TensorStats:
    least = plain.abs().amin() if plain.dtype.is_signed else lowest
    low, high, smallest = torch.stack((lowest, highest, least)).tolist()
    if smallest < 0:  # the absolute value of the smallest integer overflows
        return measure(plain)
    return TensorStats(smallest, max(abs(low), abs(high)), ValueEncoding.INTEGER << 8, RowKind.MEASURED.number)


def _bits(number: float) -> int:
    """Bits of the absolute value of a float, as core.values decodes them."""
    (bits,) = struct.unpack("<q", struct.pack("<d", abs(number)))
    return int(bits)


@never_compiled
def detect_overflow(tensor: torch.Tensor, ctx: str) -> bool:
    """Whether a tensor holds nan or inf. Prints one line for each of the two that it holds, `ctx` first.

    after layer_norm has nans
    after layer_norm has infs

    Any kind of tensor is accepted. The call waits for the device, and torch.compile breaks its graph here. In a run
    that gpuwatch watches, and under `gpuwatch.watch`, the tensor is also recorded under the name `ctx`, and an overflow
    ends the run as one in a module does: OverflowDetected.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"detect_overflow: expected a tensor, found {type(tensor).__name__}")
    numbers = without_modes(look, tensor)
    detected = print_non_finite(numbers.meta & 0xFF, ctx)
    hooks = watching_hooks()
    if hooks is not None:
        hooks.look_at(tensor, ctx)
    return detected


def print_non_finite(flags: int, ctx: str) -> bool:
    """Print the lines for `flags` (core.values.NonFinite). True if any flag is set."""
    if flags & NonFinite.NAN:
        print(f"{ctx} has nans")
    if flags & ~NonFinite.NAN:
        print(f"{ctx} has infs")
    return bool(flags)
