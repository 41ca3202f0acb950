"""Looks at every operation of a forward and of its backward, and tells for one of a backward where the forward made it.

autograd notes for each of its nodes where the forward has made it (torch's anomaly mode, without its checks). So an
operation of a backward has the line of the forward whose backward it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from linecache import getline
from typing import Any

import torch
from msgspec.structs import replace

from ...core.events.alarm_evidence import BadOperation
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite
from .code_place import CallSite, CodePlace, is_users_file, place_of
from .operands import operation_name
from .operation_watch import HandedTensor, MadeValue, OperationWatch

running_node = name_in_torch("torch._C._current_autograd_node", lambda: None)
_ENGINE = "_engine_run_backward"
_LINE = re.compile(r'File "(.+)", line (\d+), in ')
_SUMS = ("add", "add_")


class BackwardWatch(OperationWatch):  # type: ignore[no-untyped-call]  # torch has no annotation there
    """A watch whose operations may be those of a backward."""

    def __init__(
        self, module: str, names: dict[int, str], caller: CallSite | None, module_of: Callable[[int], str | None]
    ) -> None:
        """`module_of`: number of an autograd node -> the module that made it."""
        super().__init__(module, names, caller)
        self._module_of = module_of

    def _operand(self, tensor: torch.Tensor, *, read: bool = False) -> HandedTensor:
        """In a backward, an -inf of the forward explains nothing: it may be a mask. What makes nan of it is the origin.

        A nan or +inf that the forward has hidden, as torch.where does, is what the backward has used.
        """
        found = super()._operand(tensor, read=read)
        made = found.made
        is_mask = made is not None and made.flags == NonFinite.NEGINF and not made.of_backward and _is_derivative()
        return found._replace(made=None) if is_mask else found

    def _has_made(self, tensor: torch.Tensor, made: MadeValue) -> None:
        made.of_backward = _is_derivative()
        node = running_node()
        if node is not None and made.operation is not None:
            made.operation = replace(made.operation, node=str(node.name()))

    def _describe(
        self, tensor: torch.Tensor, func: Any, args: Any, kwargs: Any, handed: Any, output: Any
    ) -> BadOperation | None:
        """None for a sum that the engine itself makes, of the gradients of several uses: it has no line.

        It is made while the node counts as running whose gradient came last.
        """
        is_sum = operation_name(func) in _SUMS and running_node() is not None
        if is_sum and self._in_python(_ENGINE)[1] is None:
            return None
        return super()._describe(tensor, func, args, kwargs, handed, output)

    def _place(self) -> CodePlace:
        """As for a forward. In a backward that torch itself computes: the line of the forward that made the node."""
        node = running_node()
        if node is None:
            return super()._place()
        module, found = self._in_python(_ENGINE)
        if module is None:
            module = self._module_of(node._sequence_nr()) or ""
        if found is not None:  # a recomputed forward, or the backward of an autograd.Function
            return place_of(module, found)
        traced = [_LINE.search(text) for text in reversed(node.metadata.get("traceback_", ()))]  # it has no columns
        file, line = next(((at[1], int(at[2])) for at in traced if at and is_users_file(at[1])), ("", 0))
        return CodePlace(module, file, line, getline(file, line).strip() if file else "")


def _is_derivative() -> bool:
    """Whether what runs is of a backward, and no checkpointed forward that runs again within one."""
    return running_node() is not None and not torch.is_grad_enabled()
