"""The models that `gpuwatch.watch` watches in this process, and what removes their hooks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.guest.tell import tell
from ..core.signal_errors import from_outside
from .rank_process import note_in, wait_for_call
from .record.names import parts_of
from .session import current_hooks, is_device_error, wait_for_device

if TYPE_CHECKING:
    from torch import nn

    from .module_hooks import ModuleHooks

watching: weakref.WeakKeyDictionary[ModuleHooks, tuple[int, weakref.ref[nn.Module] | None]]
watching = weakref.WeakKeyDictionary()
"""Attached hooks of `watch` -> (the process that attached them, their model or None for all), the newest last."""
in_block: weakref.WeakSet[ModuleHooks] = weakref.WeakSet()
"""Those of a `with`, which removes them at its end."""


def watching_hooks() -> ModuleHooks | None:
    """The hooks of the run that watches this process, else the newest of `watch`; None if there are none."""
    own = [hooks for hooks, (pid, _) in watching.items() if pid == os.getpid()]
    return current_hooks() or (own[-1] if own else None)


def replace_older(model: nn.Module | None) -> None:
    """Remove what watches the same model outside of a `with`, or one that is gone: a notebook's cell runs again."""
    mine = [(hooks, of) for hooks, (pid, of) in watching.items() if pid == os.getpid() and hooks not in in_block]
    older = [hooks for hooks, of in mine if (of and of()) is model and (of is None) is (model is None)]
    for hooks in (*older, *(hooks for hooks, of in mine if of is not None and of() is None)):
        remove_hooks(hooks)
    if older:
        what = "this model was" if model is not None else "all models were"
        tell(f"gpuwatch: {what} watched already: the new watch replaces the older one, which keeps its record")


def remove_hooks(hooks: ModuleHooks) -> Exception | None:
    """Remove these hooks. The error of a device that has failed, if it has."""
    pid, _ = watching[hooks]
    failure = None
    if os.getpid() == pid:  # a forked child leaves its parent's recorder alone
        failure = failure_of(hooks, hooks.settle, rest=True)
    hooks.detach()
    del watching[hooks]
    return failure


def failure_of(hooks: ModuleHooks, collect: Callable[[], bool], *, rest: bool = False) -> Exception | None:
    """Wait for the numbers of a device. Its error, if it has failed: then none of them arrive.

    `rest`: before that, read what no hook has read.
    """
    try:
        if rest:
            hooks.read_the_rest()
        wait_for_device(collect)
    except Exception as error:
        if from_outside(error) or not is_device_error(error):
            raise
        hooks.rows.never_free()
        return error
    return None


def forked(reference: weakref.ref[ModuleHooks]) -> None:
    """In a fork: if it calls a watched model, and does not watch it itself, its parent's recorder says so."""
    hooks = reference()
    if hooks is None or hooks not in watching:
        return
    _, of = watching[hooks]
    model = of() if of is not None else None
    parts = set(parts_of(model)) if model is not None else None
    wait_for_call(
        note_in(hooks.progress.fields),
        lambda: watching_hooks() is not None,
        lambda module: parts is None or module in parts,
    )
