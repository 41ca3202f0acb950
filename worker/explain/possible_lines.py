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
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from ...core.events.alarm_evidence import PossibleLine
from ...core.frames import Frame, FramePhase, Row, RowKind, RowMark
from ...core.roles import RoleKind
from ...core.values import NonFinite
from ..record.names import inputs_of, outputs_of, parts_of
from .code_place import CallSite, CodePlace
from .forward_thread import ForwardTarget, ForwardThread
from .operands import has_numbers, numbers_of, operation_name, plain_numbers, written_by
from .operation_watch import HandedOperands, OperationWatch, made_by, place_in_storage, span_in_storage, storage_key

_MOST_LINES = 4
_CARRIES = frozenset(
    {
        *("clone", "cat", "stack", "relu", "neg", "abs", "index", "index_select", "gather", "embedding"),
        *("zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "new_ones"),
    }
)
"""Operations whose results are finite if their operands are: each element is one of theirs, 0 or 1, but for its sign.
The abs of a complex number is none of them: it may be too large."""
_ANYTHING = frozenset({-1})
"""Made by what was not seen: the run has no lines for it."""

ReadTensors = frozenset[tuple[str, str]]
"""(module, role) of the arguments and results that were read in a batch, and finite."""


def first_bad(frame: Frame, frames: Iterable[Frame]) -> Row | None:
    """What was bad first in the frame of an alarm: an argument before a result, and a mask's -inf only if nothing else
    was. None where a weight or a buffer of its batch was: the forward may use it in any place."""
    before = [each for each in frames if each.phase in (FramePhase.FORWARD, FramePhase.BUFFER)]
    held = [row for each in before for row in each.rows if row.role_kind in (RoleKind.WEIGHT, RoleKind.BUFFER)]
    if not all(row.finite or row.only_neginf for row in held):
        return None
    bad = [row for row in [*frame.inputs, *frame.outputs] if not (row.finite or row.mark & RowMark.IGNORED)]
    return next((row for row in bad if not row.only_neginf), bad[0] if bad else None)


def read_before(bad: Frame, frames: Iterable[Frame]) -> tuple[ReadTensors, int]:
    """(what was read and finite in a forward, how many calls of the bad frame's module had returned before it)."""
    forwards = [frame for frame in frames if frame.phase == FramePhase.FORWARD]
    read: set[tuple[str, str]] = set()
    other: set[tuple[str, str]] = set()
    for frame in forwards:
        for row in frame.rows:
            if row.role_kind in (RoleKind.INPUT, RoleKind.OUTPUT):
                if row.finite and row.kind in (RowKind.MEASURED, RowKind.EMPTY):
                    read.add((frame.module, row.role))
                elif frame.index < bad.index:  # one of its calls was, and another one not: a mask, an --ignore
                    other.add((frame.module, row.role))
    return frozenset(read - other), sum(frame.module == bad.module and frame.index < bad.index for frame in forwards)


class _ReadPart(NamedTuple):
    """A part of a storage that was read, and finite."""

    place: Any
    span: tuple[int, int]
    is_whole: bool
    """Nothing else lies between its first and its last byte."""


class LineageWatch(OperationWatch):  # type: ignore[no-untyped-call]  # torch has no annotation there
    """Notes for each tensor which operations have made it since the last one that was read.

    It reads the numbers of tensors that are attributes of modules, and neither weights nor buffers; and of no others.
    """

    def __init__(self, module: str, names: dict[int, str], caller: CallSite | None) -> None:
        super().__init__(module, names, caller)
        self._made: dict[int, frozenset[int]] = {}
        """Storage -> numbers of the operations."""
        self._read: dict[int, list[_ReadPart]] = {}
        """Storage -> what was read of it since it was written."""
        self._weights: set[int] = set()
        """Storages of weights and buffers: `first_bad` has seen that they were finite."""
        self._attributes: set[int] = set()
        """Storages of other tensors that modules held before the run."""
        self._of_operands = frozenset[int]()
        """What has made the operands of the operation that runs."""
        self._in_numbers = frozenset[int]()
        """What has made the numbers that the code has taken out of tensors: any float of Python's may be one."""
        self._operations: list[tuple[str, CodePlace]] = []

    def _handed_to(self, func: Any, args: Any, kwargs: Any) -> HandedOperands:
        given = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = written_by(func, args, kwargs)
        self._of_operands = frozenset[int]().union(*(self._made_of(leaf) for leaf in given if has_numbers(leaf)))
        for leaf in written:
            self._keep(leaf, operation_name(func))
        return HandedOperands(given, written, {}, {}, {})

    def _look_at(self, func: Any, args: Any, kwargs: Any, handed: HandedOperands, result: Any) -> None:
        name = operation_name(func)
        if name == "lift_fresh":  # torch.tensor(...) of numbers, or of what numpy may have made
            for leaf in handed.given:
                self._set_made(leaf, self._in_numbers if leaf.numel() == 1 else _ANYTHING)
            return
        made = self._of_operands
        if name == "_local_scalar_dense":  # item()
            self._in_numbers |= made
            return
        if any(isinstance(number, float) for number in plain_numbers(args, kwargs)):
            made |= self._in_numbers
        is_size = name == "abs" and any(leaf.is_complex() for leaf in handed.given)
        if name.removesuffix("_") not in _CARRIES or is_size:
            made |= {len(self._operations)}
        self._operations.append((name.removesuffix("_"), self._place()))
        for leaf, is_new in made_by(handed, result):
            if is_new:
                self._record(leaf, is_new=True)
            self._set_made(leaf, made)

    def _set_made(self, tensor: torch.Tensor, made: frozenset[int]) -> None:
        key = storage_key(tensor)
        if key is not None:
            self._made[key] = made
            self._read.pop(key, None)

    def _made_of(self, tensor: torch.Tensor) -> frozenset[int]:
        """What has made it since it was read. An attribute that is finite now was so before the forward."""
        key = storage_key(tensor)
        if key is None:
            return _ANYTHING
        place, (first, last) = place_in_storage(tensor), span_in_storage(tensor)
        for part in self._read.get(key, ()):
            if part.place == place or (part.is_whole and part.span[0] <= first and last <= part.span[1]):
                return frozenset()
        made = self._made.get(key)
        if made is None:
            is_held = key in self._weights or key in self._attributes
            is_bad = is_held and key not in self._weights and numbers_of(tensor)[1] & ~NonFinite.NEGINF
            made = frozenset() if is_held and not is_bad else _ANYTHING
        return made

    def holds(self, module: nn.Module) -> None:
        """Note what a module and those in it hold before the run."""
        for part in parts_of(module):
            for found, table in (
                (self._weights, part._parameters),
                (self._weights, part._buffers),
                (self._attributes, vars(part)),
            ):
                found.update(storage_key(leaf) or -1 for leaf in table.values() if isinstance(leaf, torch.Tensor))

    def was_read(self, tensor: torch.Tensor) -> None:
        """It was finite: what made it has made nothing bad. Other parts of its storage were not read with it."""
        key = storage_key(tensor)
        if key is not None:
            part = _ReadPart(place_in_storage(tensor), span_in_storage(tensor), tensor.is_contiguous())
            self._read.setdefault(key, []).append(part)

    def lines_of(self, tensor: torch.Tensor) -> list[PossibleLine]:
        """The lines that have made a tensor since the last ones that were read, in their order.

        [] if they are too many to help, or if one of them is not known: numpy or another library has made a tensor, a
        weight is not finite.
        """
        found: dict[tuple[str, int], PossibleLine] = {}
        made = self._made_of(tensor)
        if made >= _ANYTHING:
            return []
        for number in sorted(made):
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
        self._lineage.holds(self._module)
        self._handed(self._module, self._args, self._kwargs)  # its own hooks do not run
        try:
            for part in parts_of(self._module):
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
