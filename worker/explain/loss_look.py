"""What a bad loss is known to come from: the operation, its line, and the script's variables.

A loss in host memory is looked at in front of its backward, and nothing but numbers and names is kept. The number of
one on a device arrives later: what was kept of its graph is looked at then.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from ...core.events.alarm_evidence import BadOperation
from ...core.events.read_tensors import ScriptTensor
from ...core.signal_errors import suppress_own
from ..device.device import without_modes
from ..record.autograd_graph import AutogradGraph, running_engine
from ..record.held_alarms import NonFiniteRow
from ..record.plain_tensor import version_of
from .code_place import CallSite, is_of_user
from .kept_loss import KeptLoss
from .loss_graph import LossOrigin, origin_of
from .loss_variable import loss_variable, still_holds
from .operands import numbers_of
from .operation_lines import LineSearch
from .saved_operands import outside_domain
from .script_lines import holds_others, source_of
from .script_tensors import running_frames, tensors_in

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
    """The operation of the last bad loss of a rank.

    `is_read`: whether a module's output is, so that it was finite. `graphs_of`: those of the page of a number.
    `changed_since`: the weights, if an optimizer has made a step since the one of this number; else None.
    """

    def __init__(
        self,
        is_read: Callable[[nn.Module], bool],
        graphs_of: Callable[[int], list[AutogradGraph]] = lambda page: [],
        changed_since: Callable[[int], list[torch.Tensor] | None] = lambda step: None,
    ) -> None:
        self._is_read, self._graphs_of, self._changed_since = is_read, graphs_of, changed_since
        self._left = _MOST_LOOKS
        self._step = self._page = -1
        self._operation: BadOperation | None = None
        self._nodes: list[str] = []
        self._variable: tuple[ScriptTensor, CallSite] | None = None

    def begins(self, loss: torch.Tensor, step: int, is_scaled: bool) -> None:
        """A backward is about to begin from a bad loss in host memory, after `step` optimizer steps.

        `is_scaled`: a GradScaler may skip this step and go on. Before Python 3.13 a function keeps what its variables
        held when they were asked for until it returns, so they are not asked for then.
        """
        if step == self._step or not self._left:
            # of two losses in one step, which of them an alarm is about is not known
            self._operation, self._nodes = None, []
            return
        self._left, self._step = self._left - 1, step
        origin = without_modes(origin_of, loss)
        self._found(origin, loss)
        if origin is not None and not is_scaled:
            with suppress_own(Exception):
                frames = [frame for frame, _ in running_frames(sys._getframe(1))]
                self._operation = without_modes(_with_variables, origin, self._is_read, frames, True)

    def operation_of(self, bad: NonFiniteRow) -> BadOperation | None:
        """The operation that made the loss of an alarm; None if it is not known. May wait for the device."""
        self._look_later(bad)
        return self._operation if self._is_of(bad) else None

    def nodes_of(self, bad: NonFiniteRow) -> list[str]:
        """Where no operation is certain: the nodes of its graph that were handed numbers outside of their domain."""
        self._look_later(bad)
        return self._nodes if self._is_of(bad) else []

    def variable_of(self, bad: NonFiniteRow) -> ScriptTensor | None:
        """The script's variable for a loss whose number has arrived from a device; None if that is not certain."""
        self._look_later(bad)
        return self._variable[0] if self._variable is not None and self._is_of(bad) else None

    def has_not_gone_on(self, bad: NonFiniteRow, losses: Sequence[torch.Tensor], frame: FrameType) -> bool:
        """Whether the script's variables are still those of such a loss. `frame`: the innermost that runs."""
        known = self._variable if self._is_of(bad) and len(losses) == 1 else None
        return known is not None and still_holds(*known, losses[0], frame)

    def _is_of(self, bad: NonFiniteRow) -> bool:
        return bad.page.number == self._page or bad.page.step == self._step

    def _look_later(self, bad: NonFiniteRow) -> None:
        """Look at what was kept of the one loss of a page, if its number has arrived from a device."""
        kept = [graph.kept_loss for graph in self._graphs_of(bad.page.number) if graph.kept_loss is not None]
        if self._is_of(bad) or len(kept) != 1 or bad.page.losses > 1:
            return
        self._page, self._variable = bad.page.number, None
        (loss,) = kept
        weights = self._changed_since(bad.page.step)
        if weights is not None:
            loss.forget_weights(weights)
        origin = without_modes(origin_of, loss)
        self._found(origin, loss)
        with suppress_own(Exception):
            if not loss.is_scaled and version_of(loss.number) == loss.version:
                self._variable = loss_variable(loss.sites, numbers_of(loss.number)[0], self._nodes)
            if origin is not None and not loss.is_scaled:
                self._operation = without_modes(_with_variables_later, origin, loss, self._is_read)

    def _found(self, origin: LossOrigin | None, loss: torch.Tensor | KeptLoss) -> None:
        self._operation = origin.operation if origin is not None else None
        self._nodes = without_modes(outside_domain, loss) if origin is None else []


def _with_variables_later(origin: LossOrigin, loss: KeptLoss, is_read: Callable[[nn.Module], bool]) -> BadOperation:
    """As `_with_variables`. The statement that began the backward may have ended, and that of another loss may run."""
    real = LossOrigin(origin.node.itself, origin.operation, [(each and each.itself, at) for each, at in origin.handed])
    engine = running_engine()  # it may run in another thread
    frames = [frame for frame, _ in running_frames(engine or sys._getframe(1))]
    began_from = engine.f_locals.get("t_outputs", ()) if engine is not None else ()
    return _with_variables(real, is_read, frames, any(each.grad_fn is loss.grad_fn.itself for each in began_from))


def _with_variables(
    origin: LossOrigin, is_read: Callable[[nn.Module], bool], running: list[FrameType], begins: bool
) -> BadOperation:
    """The operation with the names of its operands, and with its line if that is certain.

    `running`: the frames, the innermost first. `begins`: they are those that call the backward.
    """
    names, reach = [""] * len(origin.handed), list[_GraphVariable]()
    frames = list(filter(is_of_user, running))[:_MOST_FRAMES]
    for frame in frames:
        for name, tensor in tensors_in(frame):
            for at, edge in enumerate(origin.handed):
                if not names[at] and _is_result(tensor, edge):
                    names[at] = name
            distance = _distance(tensor.grad_fn, origin.node)
            if distance is not None:
                reach.append(_GraphVariable(distance, name, frame))
    found = replace(origin.operation, variables=[name for name in names if name])

    def is_result(tensor: torch.Tensor) -> bool:
        return _distance(tensor.grad_fn, origin.node) is not None

    for statement, frame in _led_to_it(reach, frames, begins):
        inner = [each.f_code for each in running[: running.index(frame)]] if begins else []
        line = LineSearch(found.name, is_result, is_read, inner).line_in(statement, frame)
        if line is not None:
            return replace(found, file=line.file, line=line.line, code=line.code)
    return found


def _led_to_it(
    reach: list[_GraphVariable], frames: list[FrameType], begins: bool
) -> Iterator[tuple[ast.stmt | ast.expr, FrameType]]:
    """(a statement, or the right side of one, that has led to an operation, the frame that runs its function).

    `reach`: the variables that were computed from its result. The nearest of them all hold the same tensor: a function
    has it under a name of its own. Where that was handed to it, or there is none, the tensor was made in a statement
    that runs: of its caller, or of the innermost function. `frames`: those of the script's own functions. `begins`:
    they call the backward; else other statements run by now.
    """
    nearest = min((each.distance for each in reach), default=0)
    outside = 0
    for each in reach:
        if each.distance != nearest:
            continue
        source, name = source_of(each.frame), each.name.partition("[")[0]
        value = source.value_of(name, each.frame.f_lineno) if source is not None else None
        if value is not None:
            yield value, each.frame
        if source is None or not source.is_handed(name):
            return
        outside = frames.index(each.frame) + 1
    source = source_of(frames[outside]) if outside < len(frames) and begins else None
    statement = source.statement_at(frames[outside].f_lineno) if source is not None else None
    if statement is not None and not holds_others(statement):  # else what stands in it would count as well
        yield statement, frames[outside]


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
