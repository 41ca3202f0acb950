"""What a bad loss is known to come from when its backward begins: the operation, its line, and the script's variables.

Nothing but numbers and names is kept: the graph and its tensors are let go of before the backward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from ...core.events.alarm_evidence import BadOperation
from ...core.signal_errors import suppress_own
from ..device.device import without_modes
from .code_place import is_of_user
from .loss_graph import LossOrigin, origin_of
from .script_lines import source_of
from .script_tensors import tensors_in

_MOST_LOOKS = 16
"""In one run. A GradScaler makes losses that are inf, and goes on."""
_MOST_FRAMES = 8
_MOST_NODES = 2048


class _GraphVariable(NamedTuple):
    """A variable of the script's that was computed from a node's result."""

    distance: int
    """How many nodes are between."""
    name: str
    frame: FrameType


class LossLook:
    """The operation of the last bad loss of a rank."""

    def __init__(self) -> None:
        self._left = _MOST_LOOKS
        self._step = -1
        self._operation: BadOperation | None = None

    def begins(self, loss: torch.Tensor, step: int, is_scaled: bool) -> None:
        """A backward is about to begin from a bad loss, after `step` optimizer steps. May wait for the device.

        `is_scaled`: a GradScaler may skip this step and go on. Before Python 3.13 a function keeps what its variables
        held when they were asked for until it returns, so they are not asked for then.
        """
        if step == self._step or not self._left:
            self._operation = None  # of two losses in one step, which of them an alarm is about is not known
            return
        self._left, self._step = self._left - 1, step
        origin = without_modes(origin_of, loss)
        self._operation = origin.operation if origin is not None else None
        if origin is not None and not is_scaled:
            with suppress_own(Exception):
                self._operation = without_modes(_with_variables, origin)

    def operation_at(self, step: int) -> BadOperation | None:
        """That of the bad loss after this many optimizer steps; None if it is not known."""
        return self._operation if step == self._step else None


def _with_variables(origin: LossOrigin) -> BadOperation:
    """The operation with the names of its operands, and with its line if a variable of the script's tells that."""
    names, nearest = [""] * len(origin.handed), None
    for frame in _own_frames():
        for name, tensor in tensors_in(frame):
            for at, edge in enumerate(origin.handed):
                if not names[at] and _is_result(tensor, edge):
                    names[at] = name
            distance = _distance(tensor.grad_fn, origin.node)
            if distance is not None and (nearest is None or distance < nearest.distance):
                nearest = _GraphVariable(distance, name, frame)
    found = replace(origin.operation, variables=[name for name in names if name])
    source = source_of(nearest.frame) if nearest is not None else None
    if nearest is None or source is None:
        return found
    assigned = source.assigned(nearest.name.partition("[")[0], nearest.frame.f_lineno)
    operation = found.op.removeprefix("aten.").partition(".")[0]
    if not assigned.line or operation not in assigned.ops:
        return found
    return replace(found, file=nearest.frame.f_code.co_filename, line=assigned.line, code=assigned.code)


def _own_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    left = _MOST_FRAMES
    while frame is not None and left:
        if is_of_user(frame):
            left -= 1
            yield frame
        frame = frame.f_back


def _is_result(tensor: torch.Tensor, edge: tuple[Any, int]) -> bool:
    node, place = edge
    if node is None:
        return False
    return tensor is getattr(node, "variable", None) or (tensor.grad_fn is node and tensor.output_nr == place)


def _distance(start: Any, node: Any) -> int | None:
    """How many nodes lie between two nodes of a graph, in front of the second; None if it cannot be reached."""
    known, level, distance = {start}, [start], 0
    while level and start is not None and len(known) < _MOST_NODES:
        if node in level:
            return distance
        level = list({used for each in level for used, _ in each.next_functions if used is not None} - known)
        known.update(level)
        distance += 1
    return None
