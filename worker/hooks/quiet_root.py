"""Takes our hooks off the calls of modules while a root runs within which nothing is read (`--every`).

One global hook sends each call of a module through the slower part of torch's `_call_impl`, which costs more than the
hook. So while such a root runs torch's tables lack ours, and a hook on the root itself tells of its end.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .global_hooks import HANDS_OVER_KWARGS, GlobalHooks

_FLAGS = (*(["_forward_hooks_with_kwargs"] if HANDS_OVER_KWARGS else []), "_forward_hooks_always_called")
"""Tables of a module with the keys of hooks that get the keyword arguments, and of those called if it raises."""


def _none() -> None:
    return None


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
        self._with_hook: Callable[[], torch.nn.Module | None] = _none
        """The root that has the hook. Weak: one that raised has it until the next one begins."""
        self._hook, self._key = _RootHook(self), RemovableHandle(OrderedDict()).id
        """The key is no other hook's. `register_forward_hook` would make a handle for each step."""

    def begins(self, root: torch.nn.Module) -> None:
        """Take our hooks out of the tables until this call of the root ends. Called by the hook on its begin."""
        if isinstance(root, torch.jit.ScriptModule):
            return  # its hooks are compiled
        self.forget()
        self._with_hook, self._root = weakref.ref(root), root
        for name in _FLAGS:
            getattr(root, name)[self._key] = True
        hooks: Any = root._forward_hooks
        hooks[self._key] = self._hook
        hooks.move_to_end(self._key, last=False)  # first of the root's own, as ours is first of all
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
        root = self._with_hook()
        if root is not None:
            for name in ("_forward_hooks", *_FLAGS):
                getattr(root, name).pop(self._key, None)
            self._with_hook = _none
