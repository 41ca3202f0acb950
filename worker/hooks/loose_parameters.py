"""Parameters that an optimizer updates and that belong to no module that was called: tensors of the script's own.

No frame shows computations with them. Their values in host memory are read after each step, and one that is not finite
gets a frame, as a weight does. An event records, once for each class of optimizer, that the script computes with such
parameters.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ...core.events.own_limits import LooseParameters
from ...core.frames import FramePhase
from ...core.roles import param_group
from ..device.device import is_on_device
from ..record.frame_writer import FrameWriter
from ..record.tensor_stats import measure
from .accumulated_gradients import is_offloaded

_MOST_TOLD = 8
_MANY = 1024
Loose = list[tuple[int, int, torch.Tensor]]
"""(group, position in it, parameter)"""


def loose_parameter(optimizer: Any, place: str, role: str) -> torch.Tensor | None:
    """The parameter that a frame of a place (`param_group`) and a row's role in it are about; None if it is gone."""
    for number, group in enumerate(optimizer.param_groups):
        if place == param_group(number):
            named = (each for at, each in enumerate(group["params"]) if role == f"params[{at}]")
            return next(named, None)
    return None


class _ReachedHook:
    """A hook on a parameter: autograd has made a gradient of it, so the script computes with it."""

    __slots__ = ("handle", "parameter", "yes")

    def __init__(self, parameter: torch.Tensor) -> None:
        # weak: the parameter holds this hook
        self.parameter = weakref.ref(parameter)
        self.yes = False
        self.handle: Any = None
        if parameter.requires_grad and parameter.is_leaf and parameter.device.type != "meta":
            self.handle = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]  # no types

    def __call__(self, parameter: torch.Tensor) -> None:
        self.yes = True

    def remove(self) -> None:
        """Take the hook off."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.remove()


class _GradientHook:
    """A hook on a parameter: notes which gradient a backward has made of it, and how often since the last step."""

    __slots__ = ("calls", "gradient", "handle", "parameter", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.gradient: weakref.ref[torch.Tensor] | None = None
        self.calls = self.version = 0
        self.handle = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]  # no types

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self.calls += 1
            self.gradient, self.version = weakref.ref(gradient), gradient._version

    def has_made(self, gradient: torch.Tensor) -> bool:
        """Whether one backward alone has made a gradient since the last step, and nothing has changed it since."""
        known = self.gradient
        return known is not None and known() is gradient and (self.calls, self.version) == (1, gradient._version)


@dataclass(eq=False, repr=False)
class LooseReader:
    """Reads loose parameters after each step on them.

    It also reads a copy of weights that an optimizer keeps for itself (the flat float32 partition of ZeRO), but does
    not report it: the script does not compute with it, and autograd makes no gradient for it.
    """

    _frames: FrameWriter

    def __post_init__(self) -> None:
        self._progress, self._roots = self._frames.progress, self._frames.roots
        self._told: set[tuple[str, bool]] = set()
        self._reached: dict[int, _ReachedHook] = {}
        """By id of a parameter."""
        self._made: dict[int, _GradientHook] = {}
        """Likewise, where no module was called."""

    def after_step(self, optimizer: Any, loose: Loose) -> None:
        """The optimizer has stepped on these."""
        used: list[torch.Tensor] = []
        for group, position, parameter in loose:
            if self._roots.owner_of(parameter) is not None:  # its module was called in the step
                continue
            if not is_on_device(parameter):
                self._read(optimizer, group, position, parameter)
            if self._is_used(parameter):
                used.append(parameter)
        self._tell(optimizer, used)
        if self._progress.root is None:
            self._follow(loose)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the last step got, if one backward has made it as it is; else None.

        None after the first step, and where modules are called.
        """
        known, gradient = self._made.get(id(parameter)), parameter.grad
        if known is None or gradient is None or known.parameter() is not parameter or parameter._backward_hooks:
            return None
        return gradient if known.has_made(gradient) else None

    def _follow(self, loose: Loose) -> None:
        for _, _, parameter in loose:
            known = self._made.get(id(parameter))
            if known is not None and known.parameter() is parameter:
                known.calls = 0
            elif parameter.requires_grad and parameter.is_leaf and parameter.is_cpu and len(self._made) < _MANY:
                self._made[id(parameter)] = _GradientHook(parameter)

    def detach(self) -> None:
        """Take the hooks off."""
        for reached in self._reached.values():
            reached.remove()
        self._reached.clear()
        for made in self._made.values():
            made.handle.remove()
        self._made.clear()

    def _read(self, optimizer: Any, group: int, position: int, parameter: torch.Tensor) -> None:
        numbers = measure(parameter)
        if not numbers.meta & 0xFF:
            return
        name, cls = param_group(group), type(optimizer).__name__
        info = self._roots.place(name, self._progress.root, cls)
        page = info.root.page
        if page is None:
            page = self._progress.begin_page(info.root)
        else:
            self._progress.resume(page)
        row = self._frames.rows.gradient(info, f"params[{position}]", parameter, 0, numbers)
        self._frames.put(page, info, FramePhase.OPTIMIZER, [row])

    def _is_used(self, parameter: torch.Tensor) -> bool:
        """Whether the script computes with it: known from its second step on, at once where no module was called."""
        if self._progress.root is None:
            return True
        if is_offloaded(parameter):  # a hook would cost time, as is_offloaded says; the step has just used its gradient
            return parameter.grad is not None
        known = self._reached.get(id(parameter))
        if known is None or known.parameter() is not parameter:
            if len(self._reached) >= _MANY:
                self._reached = {key: each for key, each in self._reached.items() if each.parameter() is not None}
            self._reached[id(parameter)] = _ReachedHook(parameter)
            return False
        if known.yes:
            known.remove()
        return known.yes

    def _tell(self, optimizer: Any, used: list[torch.Tensor]) -> None:
        unread = sum(map(is_on_device, used))
        key = type(optimizer).__name__, unread > 0
        if used and key not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(key)
            self._progress.recorder.append(LooseParameters(self._progress.where(), key[0], len(used), unread))
