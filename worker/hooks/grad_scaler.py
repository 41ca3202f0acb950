"""GradScalers: inf in the gradients of a step that they skip is expected, unless the skips never end."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from ...core.recorder.layout import HeadField
from ..record.judging import AlarmRecorder
from ..record.progress import RunProgress
from ..stats.device import ToHost, to_host
from ..stats.without_modes import without_modes
from .backward import BackwardHooks
from .optimizer import OptimizerHooks

COLLAPSED = 1.0
"""A scale below this makes gradients smaller than they are: lowering it further cannot help."""
_MAX_SKIPS = 64


class _UnknownStep(NamedTuple):
    """A step of a fused optimizer. Whether it was skipped is being copied from the device."""

    copy: ToHost
    """found_inf and the scale."""
    optimizer: Any
    step: int
    """Optimizer steps before it."""


class GradScalerHooks:
    """Watches every GradScaler by wrapping the methods `scale`, `step` and `update` of its class.

    All watchers share one wrapper per method. The first watcher adds it, the last one removes it.
    """

    _watchers: ClassVar[list[GradScalerHooks]] = []
    _originals: ClassVar[dict[tuple[type, str], Any]] = {}

    def __init__(
        self,
        progress: RunProgress,
        judging: AlarmRecorder,
        gradients: BackwardHooks,
        steps: OptimizerHooks,
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self._progress = progress
        self._judging = judging
        self._gradients = gradients
        self._steps = steps
        self._on_fault = on_fault
        self._limit = progress.settings.scaler_skips
        self._in_a_row: dict[int, int] = {}
        """id of an optimizer -> its skipped steps since the last one that was not skipped."""
        self._skips = 0
        self._unknown: list[_UnknownStep] = []
        self._last: weakref.ref[Any] | None = None
        """The scaler that scaled a loss last."""

    def scale_in_use(self) -> float | None:
        """The scale of the scaler that scaled a loss last; None without one. Waits for the device."""
        scaler = self._last() if self._last is not None else None
        return float(scaler.get_scale()) if scaler is not None else None

    def attach(self) -> None:
        """Wrap the methods."""
        if not self._watchers:
            self._wrap(GradScaler, "__init__", _init)
            self._wrap(GradScaler, "step", _step)
            self._wrap_all(GradScaler)
        self._watchers.append(self)

    def detach(self) -> None:
        """Restore the methods, if this is the last watcher."""
        if self not in self._watchers:
            return
        self._watchers.remove(self)
        if not self._watchers:
            for (cls, name), original in self._originals.items():
                setattr(cls, name, original)
            self._originals.clear()

    @classmethod
    def _wrap_all(cls, scaler: type[Any]) -> None:
        cls._wrap_class(scaler)
        for derived in scaler.__subclasses__():
            cls._wrap_all(derived)

    @classmethod
    def _wrap_class(cls, scaler: type) -> None:
        """A class that overrides these methods, such as FSDP's, does not call those of its base."""
        cls._wrap(scaler, "scale", _scale)
        cls._wrap(scaler, "update", _update)

    @classmethod
    def _wrap(cls, scaler: type, name: str, around: Callable[..., Any]) -> None:
        original = vars(scaler).get(name)
        if original is None or (scaler, name) in cls._originals:
            return
        cls._originals[scaler, name] = original

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(scaler, name, wrapper)

    def _stepped(self, scaler: Any, optimizer: Any, step: int) -> None:
        """`scaler.step(optimizer)` has returned. A fused optimizer is always called and skips the update by itself.

        `step` is the number of optimizer steps before.
        """
        if not scaler.is_enabled():
            return
        try:
            self.collect()
            found_inf, self._steps.found_inf = self._steps.found_inf, None
            if found_inf is not None:
                self._copy_to_host(found_inf, scaler, optimizer, step)
                self.collect()
            elif self._progress.step == step:
                self._judging.finish()  # the scaler has waited for the device itself
                self._skipped(optimizer, step, float(scaler.get_scale()))
            else:
                self._not_skipped(optimizer, step)
        except Exception as error:
            self._on_fault("GradScaler", error)
        self._judging.raise_pending()

    def _copy_to_host(self, found_inf: torch.Tensor, scaler: Any, optimizer: Any, step: int) -> None:
        """Begin to copy a fused optimizer's `found_inf` and the scale to the host. Does not wait."""
        copy = to_host(found_inf, scaler._get_scale_async())
        if copy is not None:
            self._unknown.append(_UnknownStep(copy, optimizer, step))

    def collect(self) -> bool:
        """Handle the steps whose `found_inf` has arrived. True when none is outstanding.

        A step is handled only after its gradients have arrived: they may come from another stream.
        """
        if not self._unknown:
            return True
        self._judging.collect()
        while self._unknown and self._unknown[0].copy.arrived() and not self._judging.is_late(self._unknown[0].step):
            first = self._unknown.pop(0)
            found_inf, scale = first.copy.numbers
            if found_inf:
                self._skipped(first.optimizer, first.step, scale)
            else:
                self._not_skipped(first.optimizer, first.step)
        return not self._unknown

    def _not_skipped(self, optimizer: Any, step: int) -> None:
        self._in_a_row.pop(id(optimizer), None)
        self._judging.take_scaled(step)

    def _skipped(self, optimizer: Any, step: int, scale: float) -> None:
        bad = self._judging.take_scaled(step)
        if bad is None:  # it is in no watched module, or unscaling made it non-finite
            without_modes(self._steps.take_scaled_gradients, optimizer)
            bad = self._judging.take_scaled(step)
        in_a_row = self._in_a_row[id(optimizer)] = self._in_a_row.get(id(optimizer), 0) + 1
        self._skips += 1
        self._progress.fields[HeadField.SCALER_SKIPS] = self._skips
        if self._skips <= _MAX_SKIPS:
            self._judging.skipped(bad, scale, in_a_row)
        if bad is not None and (in_a_row >= self._limit or scale < COLLAPSED):
            times = f"{in_a_row} step{'s' if in_a_row != 1 else ''} in a row"
            self._judging.alarm(bad, f"GradScaler skipped {times}, its scale is down to {scale:g}")


# The wrappers. `original` is the wrapped method.


def _init(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> None:
    for cls in type(scaler).__mro__:  # the class may have been imported after attach()
        if issubclass(cls, GradScaler):
            GradScalerHooks._wrap_class(cls)
    original(scaler, *args, **kwargs)


def _scale(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    if scaler.is_enabled():
        for watcher in GradScalerHooks._watchers:  # this scaler checks the gradients of the next backward
            watcher._gradients.scaled = True
            if watcher._last is None or watcher._last() is not scaler:
                watcher._last = weakref.ref(scaler)
    return original(scaler, *args, **kwargs)


def _step(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    before = [(watcher, watcher._progress.step) for watcher in GradScalerHooks._watchers]
    result = original(scaler, optimizer, *args, **kwargs)
    for watcher, step in before:
        watcher._stepped(scaler, optimizer, step)
    return result


def _update(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    for watcher in GradScalerHooks._watchers:
        watcher._gradients.scaled = False
    return original(scaler, *args, **kwargs)
