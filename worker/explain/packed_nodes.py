"""Which nodes of autograd's may have saved a tensor that a hook has packed (docs.pytorch.org, notes/autograd).

torch tells it of each tensor from 2.10 on. Before, it follows from the numbers of the nodes. Those made under hooks
come between the call that puts these in place for a thread and the one that takes them away, and both are noted here.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch

from ...core.torch_names import name_in_torch
from ..patches import PatchLedger
from ..record.autograd_graph import next_node

_TELLS = name_in_torch("torch._C._autograd.SavedTensor.unpack_hook") is not None
"""torch tells it of each tensor."""
_MOST_SPANS = 1024
_now_in_place = name_in_torch("torch._C._autograd._top_saved_tensors_default_hooks", lambda _: None)


class PackedNodes:
    """The numbers of the nodes of each thread that were made under hooks, while `attach` is in force."""

    def __init__(self) -> None:
        self._known_from = 0
        """What nodes with lower numbers have saved is not known."""
        self._depth: dict[int, int] = {}
        """Of a thread: how many pairs of hooks are in place."""
        self._open: dict[int, int] = {}
        """Of a thread in which some are: the number of its next node when they were put in place."""
        self._spans: dict[int, list[tuple[int, int]]] = {}
        """Of a thread: from the first node under hooks up to, and without, the first one after them."""

    def attach(self, patches: PatchLedger) -> None:
        """Follow the hooks that are put in place from now on."""
        owner = torch._C._autograd
        patches.replace(owner, "_push_saved_tensors_default_hooks", lambda before: partial(self.push, before))
        patches.replace(owner, "_pop_saved_tensors_default_hooks", lambda before: partial(self.pop, before))
        patches.replace(owner.SavedTensor, "register_hooks", self._around_register)
        _followed.append(self)
        patches.at_undo(lambda: _followed.remove(self))
        self._known_from = next_node()
        if _now_in_place(True) is not None:  # how many there are, torch does not tell
            self._depth[get_ident()] = sys.maxsize
            self._open[get_ident()] = 0

    def may_have(self, node: Any) -> bool:
        """Whether a tensor that this node has saved may be packed."""
        number = node._sequence_nr()
        if number < self._known_from or any(first <= number for first in list(self._open.values())):
            return True
        for spans in list(self._spans.values()):
            before = bisect_right(spans, (number, sys.maxsize))
            if before and number < spans[before - 1][1]:
                return True
        return False

    def push(self, before: Callable[..., None], *hooks: Any) -> None:
        """Hooks are put in place by `before`."""
        before(*hooks)
        thread = get_ident()
        self._depth[thread] = self._depth.get(thread, 0) + 1
        self._open.setdefault(thread, next_node())

    def pop(self, before: Callable[[], None]) -> None:
        """The last ones are taken away by `before`."""
        before()
        thread = get_ident()
        depth, end = self._depth.get(thread, 0) - 1, next_node()
        self._depth[thread] = max(depth, 0)
        if depth <= 0:
            self._close(self._spans.setdefault(thread, []), self._open.pop(thread, None), end)

    def _around_register(self, before: Callable[..., None]) -> Callable[..., None]:
        def register(saved: Any, *hooks: Any) -> None:
            self._known_from = sys.maxsize  # torch does not tell which node has saved this tensor
            before(saved, *hooks)

        return register

    def _close(self, spans: list[tuple[int, int]], first: int | None, end: int) -> None:
        if first is None:  # they were put in place before `attach`, or a signal's handler raised just then
            self._known_from = max(self._known_from, end)
            return
        spans.append((first, end))
        if len(spans) > _MOST_SPANS:
            half = _MOST_SPANS // 2
            self._known_from = max(self._known_from, spans[half - 1][1])
            del spans[:half]


_followed: list[PackedNodes] = []
"""One for each watcher of this process."""


def follow_packed_nodes(patches: PatchLedger) -> None:
    """Have `may_be_packed` tell of the nodes made from now on, with a torch that does not tell it."""
    if not _TELLS:
        PackedNodes().attach(patches)


def may_be_packed(node: Any, raw: Any) -> bool:
    """Whether a hook may have to unpack what this node has saved. `raw`: its `_raw_saved_...`, as torch gives it."""
    if getattr(raw, "unpack_hook", raw) is None:
        return False
    return _TELLS or all(each.may_have(node) for each in _followed)
