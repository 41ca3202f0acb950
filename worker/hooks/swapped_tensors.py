"""Tensors whose contents torch swaps (`torch.utils.swap_tensors`), as `Module.to` does with the parameters of FSDP2.

torch refuses a tensor that anybody refers to weakly, and gpuwatch refers so to each parameter that it has seen. The
reference stays right: a tensor is the same object after a swap. What is known of its content is not.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...core.signal_errors import then_put_back
from ..device.device import without_modes
from ..patches import PatchLedger
from ..record.frame_writer import FrameWriter
from .backward import BackwardHooks


class _OtherReferences:
    """In place of the module `weakref` while torch swaps: it sees no weak references of gpuwatch's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(tensor: torch.Tensor) -> list[Any]:
        # an object has one weak reference without a callback, which all who ask for one share: it is not known whether
        # the script has asked as well
        return [
            each
            for each in weakref.getweakrefs(tensor)
            if type(each) is not weakref.ref or each.__callback__ is not None
        ]


_OTHERS = _OtherReferences()


@dataclass(eq=False, repr=False)
class SwappedTensors:
    """What a rank knows of the contents of tensors."""

    _frames: FrameWriter
    _gradients: BackwardHooks

    def __post_init__(self) -> None:
        self._progress, self._roots, self._rows = self._frames.progress, self._frames.roots, self._frames.rows

    def attach(self, patches: PatchLedger) -> None:
        """Be told of swaps."""
        patches.replace(torch.utils, "swap_tensors", self._around)
        patches.at_undo(self._let_go)

    def _let_go(self) -> None:
        """The watch has ended, and torch asks for weak references of anybody's again."""
        self._rows.forget()
        self._rows.weights.clear()
        self._roots.parameters.clear()

    def _around(self, swap: Callable[..., None]) -> Callable[..., None]:
        names: dict[str, Any] = getattr(inspect.unwrap(swap), "__globals__", {})

        def put_back() -> None:
            names["weakref"] = weakref

        @functools.wraps(swap)
        def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
            if "weakref" in names:
                names["weakref"] = _OTHERS
                then_put_back(functools.partial(swap, t1, t2), put_back)
            else:  # another torch
                swap(t1, t2)
            self.swapped(t1)
            self.swapped(t2)

        return swap_tensors

    def swapped(self, tensor: torch.Tensor) -> None:
        """Forget what it held, and watch the gradient of what it holds now: hooks on a tensor go with its content."""
        with self._progress.faults.within("swapped tensors"), self._progress.lock:
            without_modes(self._forget, tensor)

    def _forget(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        for known in (self._rows.seen, self._rows.weights, self._gradients.local):
            known.pop(key, None)
        _, handles = self._gradients.parameters.pop(key, (None, ()))
        for handle in handles:
            handle.remove()
        if handles and not tensor._post_accumulate_grad_hooks:
            # torch calls hooks of the content, and this table was of the other content: a hook in it would never run
            tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # torch's own first value
        owner = self._roots.owner_of(tensor)
        if owner is not None:
            self._gradients.watch_parameter(tensor, *owner)
