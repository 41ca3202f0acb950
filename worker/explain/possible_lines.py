"""The lines that may have made a bad value of a forward, where that cannot run again as it was.

The numbers of a device may arrive when an optimizer step has changed the weights, or when the batch is gone. Then the
forward runs with what is there. Its numbers say nothing, but its operations are those that ran: from the tensor that
was bad, backwards through what each operation was handed, to tensors that were read and finite.

    h = self.up(x)              read: the search ends here
    g = (h * 30).exp()          mul, exp
    return self.down(g)         `down` was handed nan: the line above has made it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ...core.events.alarm_evidence import PossibleLine
from ...core.frames import Frame, FramePhase, Row
from ...core.roles import RoleKind
from ..record.names import inputs_of, outputs_of
from .code_place import CallSite, CodePlace
from .forward_thread import ForwardTarget, ForwardThread
from .operands import has_numbers, operation_name, written_by
from .operation_watch import HandedOperands, OperationWatch, storage_key

_MOST_LINES = 4
_CARRIES = frozenset({"clone", "cat", "stack", "relu", "neg", "abs", "index", "index_select", "gather", "embedding"})
"""Operations whose results are finite if their operands are: each element is one of theirs, or 0, but for its sign."""

ReadTensors = frozenset[tuple[str, str]]
"""(module, role) of the arguments and results that were read in a batch, and finite."""


def first_bad(frame: Frame) -> Row | None:
    """What was bad first in the frame of an alarm: an argument before a result. None where a weight was."""
    if not all(row.finite for row in frame.weights):
        return None
    return next((row for row in [*frame.inputs, *frame.outputs] if not row.finite), None)


def read_before(bad: Frame, frames: Iterable[Frame]) -> tuple[ReadTensors, int]:
    """(what was read and finite in a forward, how many calls of the bad frame's module had returned before it)."""
    forwards = [frame for frame in frames if frame.phase == FramePhase.FORWARD]
    read = frozenset(
        (frame.module, row.role)
        for frame in forwards
        for row in frame.rows
        if row.role_kind in (RoleKind.INPUT, RoleKind.OUTPUT) and row.finite
    )
    return read, sum(frame.module == bad.module and frame.index < bad.index for frame in forwards)


class LineageWatch(OperationWatch):  # type: ignore[no-untyped-call]  # torch has no annotation there
    """Notes for each tensor which operations have made it since the last one that was read. It reads no numbers."""

    def __init__(self, module: str, names: dict[int, str], caller: CallSite | None) -> None:
        super().__init__(module, names, caller)
        self._made: dict[int, frozenset[int]] = {}
        """Storage -> numbers of the operations."""
        self._operations: list[tuple[str, CodePlace]] = []

    def _handed_to(self, func: Any, args: Any, kwargs: Any) -> HandedOperands:
        given = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = written_by(func, args, kwargs)
        for leaf in written:
            self._keep(leaf, operation_name(func))
        return HandedOperands(given, written, {}, {}, {})

    def _look_at(self, func: Any, args: Any, kwargs: Any, handed: HandedOperands, result: Any) -> None:
        name, inside = operation_name(func), {storage_key(leaf) for leaf in handed.given}
        operands = [self._made.get(storage_key(leaf) or -1, frozenset()) for leaf in handed.given if has_numbers(leaf)]
        made = frozenset[int]().union(*operands)
        if name.removesuffix("_") not in _CARRIES:
            made |= {len(self._operations)}
        self._operations.append((name.removesuffix("_"), self._place()))
        written = {id(leaf) for leaf in handed.written}
        for leaf in [*handed.written, *_pytree.tree_leaves(result)]:
            if not isinstance(leaf, torch.Tensor) or not has_numbers(leaf):
                continue
            key = storage_key(leaf)
            if id(leaf) not in written:
                if key in inside:  # a view
                    continue
                self._record(leaf, is_new=True)
            if key is not None:
                self._made[key] = made

    def was_read(self, tensor: torch.Tensor) -> None:
        """It was finite: what made it has made nothing bad."""
        self._made.pop(storage_key(tensor) or -1, None)

    def lines_of(self, tensor: torch.Tensor) -> list[PossibleLine]:
        """The lines that have made a tensor since the last ones that were read, in their order.

        [] if they are too many to help, or if one of them is not known.
        """
        found: dict[tuple[str, int], PossibleLine] = {}
        for number in sorted(self._made.get(storage_key(tensor) or -1, ())):
            name, at = self._operations[number]
            line = found.setdefault((at.file, at.line), PossibleLine(at.file, at.line, at.code, []))
            if name not in line.ops:
                line.ops.append(name)
        is_known = len(found) <= _MOST_LINES and all(file for file, _ in found)
        return list(found.values()) if is_known else []


class LineThread(ForwardThread):
    """A forward that runs to find the lines that may have made the tensor of its target."""

    def __init__(
        self,
        module: nn.Module,
        method: str,
        target: ForwardTarget,
        args: Any,
        kwargs: Any,
        watch: LineageWatch,
        names: dict[int, str],
        read: ReadTensors,
        calls_before: int,
    ) -> None:
        super().__init__(module, method, target, args, kwargs, watch)
        self._lineage, self._names, self._read, self._calls_left = watch, names, read, calls_before
        self.lines: list[PossibleLine] = []

    def _call(self) -> None:
        handles = []
        try:
            for part in self._module.modules():
                handles.append(nn.Module.register_forward_pre_hook(part, self._handed, with_kwargs=True))
                handles.append(nn.Module.register_forward_hook(part, self._returned, prepend=True))
            output = getattr(self._module, self._method)(*self._args, **self._kwargs)
            if self._target.module is self._module:  # its own hooks have not run
                self._returned(self._module, (), output)
        finally:
            for handle in handles:
                handle.remove()

    def _handed(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._meet(module, inputs_of(args, kwargs), is_output=False)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._meet(module, outputs_of(output), is_output=True)

    def _meet(self, module: nn.Module, leaves: list[tuple[str, Any]], *, is_output: bool) -> None:
        target = self._target
        if module is target.module and is_output is target.is_output:
            self._calls_left -= 1
            if self._calls_left == -1:
                self._look(leaves)
                return
        name = self._names.get(id(module))
        for role, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (name, role) in self._read:
                self._lineage.was_read(leaf)

    def _look(self, leaves: list[tuple[str, Any]]) -> None:
        row = self._target.row
        leaf = next((leaf for role, leaf in leaves if role == row.role), None)
        if isinstance(leaf, torch.Tensor) and (row.shape is None or leaf.dim() == len(row.shape)):
            self.lines = self._lineage.lines_of(leaf)
