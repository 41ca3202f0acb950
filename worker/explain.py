"""`gpuwatch.explain(module, x)`: which operation of this forward makes inf or nan, and which come close to it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from ..core.events import BadOperation, OperandNumbers, operation_text
from ..core.frames import format_number
from ..core.values import headroom
from .hooks.forward_thread import kept_as_it_is, runs_eagerly
from .hooks.operation_watch import CodePlace, OperationWatch, SecondRunStopped
from .record.names import outputs_of, unwrap, walk

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class SeenOperation:
    """What one operation of a forward returned. `headroom`: powers of two up to the largest number of its dtype."""

    op: str
    place: CodePlace
    output: OperandNumbers
    headroom: float | None
    """None if the output is not finite, or 0 throughout."""


@dataclass(frozen=True, slots=True)
class ForwardExplanation:
    """What `explain` has found. `print` shows the operation, and the operations with the least headroom."""

    operation: BadOperation | None
    """The first operation that made the bad value of the output; None if the output is finite, or nobody knows it."""
    unknown: str
    """Why it is not known; "" if it is, or the output is finite."""
    operations: list[SeenOperation]
    """All that returned floating point numbers, in their order."""

    def __str__(self) -> str:
        if self.operation is not None:
            first = operation_text(self.operation)
        else:
            first = f"not known: {self.unknown}" if self.unknown else "the output is finite"
        lines = [first, "headroom    abs max  operation"]
        by_headroom = sorted(self.operations, key=lambda seen: -1.0 if seen.headroom is None else seen.headroom)
        shown = [seen for seen in by_headroom if seen.headroom is not None or seen.output.value != "finite"]
        for seen in shown[:_MOST_SHOWN]:
            finite = seen.output.value == "finite"
            room = f"{seen.headroom:8.1f}" if seen.headroom is not None else f"{'-':>8}"
            size = format_number(seen.output.abs_max) if finite else f"{seen.output.value:>8}"
            place = seen.place
            at = f", {PurePath(place.file).name}:{place.line}: {place.code}" if place.file else ""
            lines.append(f"{room}   {size}  {seen.op}{at}")
        return "\n".join(lines)


def explain(module: nn.Module, *args: Any, **kwargs: Any) -> ForwardExplanation:
    """Call `module(*args, **kwargs)` once without gradients, and look at what each of its operations returns.

    Returns the operation that made an inf or nan of the output, with its line and the sizes of its operands, and all
    operations by their headroom. Buffers, attributes and random numbers are then as before. It waits for the device.
    Errors of the forward are raised. Compiled modules run eagerly where torch can (2.6 and later).
    """
    run = unwrap(module)
    watch = OperationWatch("", {id(part): name for name, part in walk(run)}, sys._getframe(1))
    seen: list[SeenOperation] = []

    def note(op: str, place: CodePlace, output: OperandNumbers) -> None:
        room = headroom(output.abs_max, output.dtype) if output.abs_max else None
        seen.append(SeenOperation(op, place, output, room))

    watch.on_output = note
    operation, unknown = None, ""
    with kept_as_it_is(run, watch, None), torch.no_grad(), (runs_eagerly() or nullcontext)():
        try:
            with watch:
                result = run(*args, **kwargs)
        except SecondRunStopped as stopped:
            return ForwardExplanation(None, str(stopped), seen)
        leaves = [leaf for _, leaf in outputs_of(result) if isinstance(leaf, torch.Tensor)]
        found = [origin for origin, flags in map(watch.origin_of, leaves) if flags]
        if found:
            operation = next((origin.operation for origin in found if origin is not None), None)
            unknown = "" if operation is not None else "it was in what the module was handed or holds"
    return ForwardExplanation(operation, unknown, seen)
