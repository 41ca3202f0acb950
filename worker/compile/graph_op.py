"""The operator by which a running graph reads a tensor in host memory.

    gpuwatch::look(Tensor x, Tensor(a!) token, int place) -> ()      writes the tensor's numbers into SEEN[place]

Reductions traced into the graph would be slower. The compiler makes them a separate loop, which recomputes the tensors
that are not kept (around a dropout, its whole backward) and handles nan in floating point. On the CPU, with torch 2.13,
this takes ten times as long as reading the memory once.

The operator is declared to change its token. A compiler therefore does not remove the call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..stats.tensor_stats import NOT_MEASURABLE, TensorReading, TensorStats, measure

try:
    from ..native.core import Look
except ImportError:  # gpuwatch was installed without a C compiler
    Look = None  # type: ignore[assignment,misc]


SEEN: list[TensorReading | None] = []
"""place -> the numbers that a graph wrote there. The reader sets it back to None."""


def new_place() -> int:
    """A new index into SEEN."""
    SEEN.append(None)
    return len(SEEN) - 1


def _look(tensor: torch.Tensor, token: torch.Tensor, place: int) -> None:
    try:
        seen = TensorReading(measure(tensor), tuple(tensor.shape))
    except Exception:  # an error here must not end the training
        seen = TensorReading(NOT_MEASURABLE, ())
    if 0 <= place < len(SEEN):
        SEEN[place] = seen


def _look_at_meta(tensor: torch.Tensor, token: torch.Tensor, place: int) -> None:
    """A meta tensor, as in tracing, has no numbers."""


def _native_look() -> object:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if Look is None or exchange is None:
        return _look
    try:
        return Look(
            exchange=exchange, seen=SEEN, cls=TensorReading, numbers=TensorStats, tensor=torch.Tensor, otherwise=_look
        )
    except (TypeError, ValueError):  # a torch version whose internals differ
        return _look


_library: Any = torch.library.Library("gpuwatch", "DEF")  # type: ignore[no-untyped-call]  # torch has no annotation
_library.define("look(Tensor x, Tensor(a!) token, int place) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_library.impl("look", _native_look(), "CPU")
_library.impl("look", _look_at_meta, "Meta")
