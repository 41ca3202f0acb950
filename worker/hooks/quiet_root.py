"""Takes our hooks off the calls of modules while a root runs within which nothing is read (`--every`).

One global hook sends each call of a module through the slower part of torch's `_call_impl`, which costs more than the
hook. So while such a root runs torch's tables lack ours, and a hook on the root itself tells of its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .global_hooks import HANDS_OVER_KWARGS, GlobalHooks


class _RootHook:
    """Called when the root returns or raises. A copy of the root has one that does nothing."""

    def __init__(self, quiet: QuietRoot | None = None) -> None:
        self._quiet = quiet

    def __call__(self, module: torch.nn.Module, *rest: Any) -> None:
        if self._quiet is not None:
            self._quiet.ends(module, *rest)

    def __reduce__(self) -> tuple[type[_RootHook], tuple[()]]:
        return _RootHook, ()


class QuietRoot:
    """At most one root of a rank at a time. `after`: the hook on the end of a module's call."""

    def __init__(self, hooks: GlobalHooks, after: Callable[..., None]) -> None:
        self._hooks, self._after = hooks, after
        self._root: torch.nn.Module | None = None
        """The root while it runs; after an interrupt, until the next one."""
        self._handle: RemovableHandle | None = None

    def begins(self, root: torch.nn.Module) -> None:
        """Take our hooks out of the tables until this call of the root ends. Called by the hook on its begin."""
        if isinstance(root, torch.jit.ScriptModule):
            return  # its hooks are compiled
        self.forget()
        named: dict[str, bool] = {"with_kwargs": True} if HANDS_OVER_KWARGS else {}
        # first of the root's own, as ours is first of all
        self._handle = root.register_forward_hook(_RootHook(self), prepend=True, always_call=True, **named)
        self._root = root
        self._hooks.take_off_calls()

    def ends(self, module: torch.nn.Module, *rest: Any) -> None:
        """A root with our hook has returned or raised: then its output, the last of `rest`, is None."""
        if module is not self._root:
            return
        self._root = None
        self._hooks.put_on_calls()
        if rest[-1] is not None:
            self.forget()  # else torch walks through the root's hooks, and their table must stay as it is
        self._after(module, *rest)

    def forget(self) -> None:
        """Take the hook off the root."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
