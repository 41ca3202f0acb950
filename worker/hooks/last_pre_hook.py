"""A hook that torch calls right before an optimizer's step: after the pre-hooks of the script.

torch calls the global pre-hooks first, ours among them, and then the optimizer's own (torch/optim/optimizer.py,
profile_hook_step). Any of them may change gradients. So where hooks of others come after ours, an entry at the end of
the optimizer's own table reads what the step will use. It is entered anew in each step: hooks that the script has
registered since stay in front of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

PreHook = Callable[[Any, Any, Any], tuple[Any, Any] | None]


class LastPreHook:
    """`hook`, called last before a step. The optimizer's table has it during the step alone."""

    def __init__(self, hook: PreHook) -> None:
        self._hook = hook
        self._handles: dict[int, RemovableHandle] = {}
        """id of an optimizer -> the entry in its table. Steps may be nested: one optimizer may call another's."""

    def put(self, optimizer: Any) -> None:
        """Have it called in this step. For a global pre-hook: torch has not begun with the optimizer's own by then."""
        table = optimizer._optimizer_step_pre_hooks
        handle = RemovableHandle(table)
        self._handles[id(optimizer)] = handle  # first: a signal's handler may raise before the next line
        table[handle.id] = self._hook

    def take(self, optimizer: Any) -> None:
        """Take it out again: the step has ended, or another one begins after one that raised."""
        handle = self._handles.get(id(optimizer))
        if handle is not None:
            handle.remove()  # it holds the table weakly, and so does nothing to another optimizer with this id
            del self._handles[id(optimizer)]

    def detach(self) -> None:
        """Take it out of all tables."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
