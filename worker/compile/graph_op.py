"""The operator with which a graph looks at a tensor in host memory, while it runs.

    gpuwatch::look(Tensor x, Tensor(a!) token, int place) -> ()      puts what it has seen into SEEN[place]

Not reductions in the graph itself. A compiler makes those a loop of their own that computes again what it does not keep
(for the gradients around a dropout, a whole backward of it), in floats and their rules for nan: on the CPU, with torch
2.13, that is ten times the time of one look at memory as it lies. The token is what it pretends to change: no compiler
removes it then, or changes the order of two of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..stats.tensor_stats import NOT_MEASURABLE, TensorStats, measure

try:
    from ..native.core import Look
except ImportError:  # there was no compiler where this was installed
    Look = None  # type: ignore[assignment,misc]


class Seen(NamedTuple):
    """What was seen of a tensor."""

    numbers: TensorStats
    shape: tuple[int, ...]


SEEN: list[Seen | None] = []
"""place -> what a graph has seen there and nobody has read; whoever reads it puts None back."""


def new_place() -> int:
    """A number that no other look has."""
    SEEN.append(None)
    return len(SEEN) - 1


def _look(tensor: torch.Tensor, token: torch.Tensor, place: int) -> None:
    try:
        seen = Seen(measure(tensor), tuple(tensor.shape))
    except Exception:  # whatever it is, the training goes on
        seen = Seen(NOT_MEASURABLE, ())
    if 0 <= place < len(SEEN):
        SEEN[place] = seen


def _look_of_the_compiler(tensor: torch.Tensor, token: torch.Tensor, place: int) -> None:
    """There are no numbers yet."""


def _compiled_look() -> object:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if Look is None or exchange is None:
        return _look
    try:
        return Look(exchange=exchange, seen=SEEN, cls=Seen, numbers=TensorStats, tensor=torch.Tensor, otherwise=_look)
    except (TypeError, ValueError):  # a torch that has changed
        return _look


_library: Any = torch.library.Library("gpuwatch", "DEF")  # type: ignore[no-untyped-call]  # torch has no annotation
_library.define("look(Tensor x, Tensor(a!) token, int place) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_library.impl("look", _compiled_look(), "CPU")
_library.impl("look", _look_of_the_compiler, "Meta")
