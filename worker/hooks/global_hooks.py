"""Our hooks in torch's global tables: for every module call and every optimizer step of the process.

A script or a library may clear these tables. What runs until they are put back has no frame, so it must be noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from ...core.recorder.layout import HeadField
from ..record.progress import RunProgress
from .running_calls import RunningCalls

HANDS_OVER_KWARGS = "with_kwargs" in inspect.signature(torch_module.register_module_forward_hook).parameters
"""Whether torch passes keyword arguments to a global forward hook. torch 2.5 does not: its frames lack them."""

_FLAGS = (
    *(["_global_forward_hooks_with_kwargs"] if HANDS_OVER_KWARGS else []),
    "_global_forward_hooks_always_called",
)
"""Tables that hold True for a forward hook that was registered so."""


class GlobalHooks:
    """The global hooks of one rank."""

    def __init__(self, running: RunningCalls, progress: RunProgress) -> None:
        self._running = running
        self._fields = progress.fields
        self.handles: list[Any] = []
        """As torch gave them; [] while none is registered."""
        self._entries: list[tuple[ModuleType, str, int, Any]] = []
        """(torch's module, name of its table, key, value) of all that torch must hold."""
        self._tables: list[dict[int, Any]] = []
        """Those of the entries when they were made. A script may have replaced one since."""

    def attach(
        self,
        before: Callable[..., Any],
        after: Callable[..., Any],
        before_step: Callable[..., Any],
        after_step: Callable[..., Any],
    ) -> None:
        """Register them. They fire for existing modules and optimizers and for those made later."""
        extra = {"with_kwargs": True} if HANDS_OVER_KWARGS else {}
        of_before = torch_module.register_module_forward_pre_hook(before)
        of_after = torch_module.register_module_forward_hook(after, always_call=True, **extra)
        of_step = torch_optimizer.register_optimizer_step_pre_hook(before_step)
        of_stepped = torch_optimizer.register_optimizer_step_post_hook(after_step)
        self.handles = [of_before, of_after, of_step, of_stepped]
        self._entries = [
            (torch_module, "_global_forward_pre_hooks", of_before.id, before),
            (torch_module, "_global_forward_hooks", of_after.id, after),
            *((torch_module, flag, of_after.id, True) for flag in _FLAGS),
            (torch_optimizer, "_global_optimizer_pre_hooks", of_step.id, before_step),
            (torch_optimizer, "_global_optimizer_post_hooks", of_stepped.id, after_step),
        ]
        self._tables = [getattr(place, name) for place, name, _, _ in self._entries]

    def put_back(self) -> None:
        """Register again what somebody has cleared: what ran meanwhile was not recorded.

        It gets the key that it had: whoever then fills the table with what was there finds it once and not twice.
        """
        gone = False
        for place, name, key, value in self._entries:
            table = getattr(place, name)
            if key not in table:
                table[key] = value
                gone = True
        if gone:
            self._running.drop_dead()
            fields = self._fields
            if not fields[HeadField.HOOKS_GONE]:
                fields[HeadField.GONE_PAGE] = fields[HeadField.PAGE]
            fields[HeadField.HOOKS_GONE] += 1

    def detach(self) -> None:
        """Remove them."""
        for handle in self.handles:
            handle.remove()
        # torch (up to at least 2.13) does not clean all three tables of a forward hook
        for (place, name, key, _), table in zip(self._entries, self._tables, strict=True):
            table.pop(key, None)
            getattr(place, name).pop(key, None)
        self.handles, self._entries, self._tables = [], [], []
