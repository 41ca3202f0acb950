"""`torch.export` traces a model without our hooks.

With `strict=True` it refuses a model while any global hook is attached (torch 2.13). What it calls is no training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..patches import PatchLedger
from .global_hooks import GlobalHooks

_EXPORTS = ("export", "export_for_training", "export_for_inference", "draft_export")
"""Functions of torch.export that trace a module. The first is in every torch, the others are not."""


class ExportPatches:
    """Those functions, replaced."""

    def __init__(self, hooks: GlobalHooks) -> None:
        self._hooks = hooks

    def attach(self, patches: PatchLedger) -> None:
        """Of this process's torch."""
        for name in _EXPORTS:
            if name in vars(torch.export) or name == _EXPORTS[0]:
                patches.replace(torch.export, name, self._without_hooks)

    def _without_hooks(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def export(*args: Any, **kwargs: Any) -> Any:
            ours = {handle.id for handle in self._hooks.handles}
            tables = [table for handle in self._hooks.handles if (table := handle.hooks_dict_ref()) is not None]
            before = [dict(table) for table in tables]
            for table in tables:
                for each in ours & table.keys():
                    del table[each]
            try:
                return call(*args, **kwargs)
            finally:
                ours &= {handle.id for handle in self._hooks.handles}  # they may have been detached since
                for table, earlier in zip(tables, before, strict=True):
                    since = dict(table)
                    table.clear()  # ours come back at the places that they had among others' hooks
                    table.update({each: hook for each, hook in earlier.items() if each in ours or each in since})
                    table.update(since)

        return export
