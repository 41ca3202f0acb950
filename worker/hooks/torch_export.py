"""`torch.export` traces a model without our hooks.

With `strict=True` it refuses a model while any global hook is attached (torch 2.13). What it calls is no training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_EXPORTS = ("export", "export_for_training", "export_for_inference", "draft_export")
"""Functions of torch.export that trace a module. Not every version of torch has all of them."""


class ExportPatches:
    """Those functions, replaced. `attach` puts ours in place, `detach` takes them away."""

    def __init__(self, handles: Callable[[], list[Any]]) -> None:
        """`handles` returns those of the global hooks, as torch gave them."""
        self._handles = handles
        self._replaced: list[tuple[str, Any, Any]] = []

    def attach(self) -> None:
        """Of this process's torch."""
        for name in _EXPORTS:
            before = getattr(torch.export, name, None)
            if before is not None:
                ours = self._without_hooks(before)
                setattr(torch.export, name, ours)
                self._replaced.append((name, before, ours))

    def detach(self) -> None:
        """Put back what was there. A function that somebody else has replaced since stays."""
        for name, before, ours in self._replaced:
            if getattr(torch.export, name) is ours:
                setattr(torch.export, name, before)
        self._replaced = []

    def _without_hooks(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def export(*args: Any, **kwargs: Any) -> Any:
            ours = {handle.id for handle in self._handles()}
            tables = [table for handle in self._handles() if (table := handle.hooks_dict_ref()) is not None]
            before = [dict(table) for table in tables]
            for table in tables:
                for each in ours & table.keys():
                    del table[each]
            try:
                return call(*args, **kwargs)
            finally:
                ours &= {handle.id for handle in self._handles()}  # they may have been detached since
                for table, earlier in zip(tables, before, strict=True):
                    since = dict(table)
                    table.clear()  # ours come back at the places that they had among others' hooks
                    table.update({each: hook for each, hook in earlier.items() if each in ours or each in since})
                    table.update(since)

        return export
