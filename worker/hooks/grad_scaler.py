"""GradScalers: inf in the gradients of a step that they skip is expected, unless the skips never end."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.amp.grad_scaler import GradScaler

from ...core.frames import FramePhase
from ...core.judge import may_be_scaling
from ...core.recorder.layout import HeadField
from ..device.device import ToHost, to_host, without_modes
from ..patches import PatchLedger
from ..record.frame_writer import FrameWriter
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


@dataclass(eq=False, repr=False)
class GradScalerHooks:
    """Watches every GradScaler by wrapping the methods `scale`, `step` and `update` of its class."""

    _frames: FrameWriter
    _gradients: BackwardHooks
    _steps: OptimizerHooks

    def __post_init__(self) -> None:
        self._progress, self._judging = self._frames.progress, self._frames.judging
        self._limit = self._progress.settings.scaler_skips
        self._in_a_row: dict[int, tuple[weakref.ref[Any], int]] = {}
        """id of an optimizer -> itself, and its skipped steps since the last one that was not skipped."""
        self._skips = 0
        self._unknown: list[_UnknownStep] = []
        self._not_read: list[int] = []
        """Numbers of steps that were not skipped, while numbers of their batches are on their way from a device."""
        self._wrapped: set[type] = set()
        """GradScaler, and the classes derived from it whose methods are wrapped, too."""
        self._last: weakref.ref[Any] | None = None
        """The scaler that scaled a loss last."""

    def scale_in_use(self) -> float | None:
        """The scale of the scaler that scaled a loss last; None without one. Waits for the device."""
        scaler = self._last() if self._last is not None else None
        return float(scaler.get_scale()) if scaler is not None else None

    def attach(self, patches: PatchLedger) -> None:
        """Wrap the methods."""
        patches.at_undo(self._wrapped.clear)
        patches.replace(GradScaler, "__init__", lambda before: self._around_init(before, patches))
        patches.replace(GradScaler, "step", self._around_step)
        self._wrap_all(GradScaler, patches)

    def _wrap_all(self, scaler: type[Any], patches: PatchLedger) -> None:
        self._wrap_class(scaler, patches)
        for derived in scaler.__subclasses__():
            self._wrap_all(derived, patches)

    def _wrap_class(self, scaler: type, patches: PatchLedger) -> None:
        """A class that overrides these methods, such as FSDP's, does not call those of its base."""
        if scaler not in self._wrapped:
            self._wrapped.add(scaler)
            for name, around in (("scale", self._around_scale), ("update", self._around_update)):
                if name in vars(scaler) or scaler is GradScaler:
                    patches.replace(scaler, name, around)

    def _around_init(self, before: Callable[..., None], patches: PatchLedger) -> Callable[..., None]:
        @functools.wraps(before)
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            for cls in type(scaler).__mro__:  # the class may have been imported after attach()
                if issubclass(cls, GradScaler):
                    self._wrap_class(cls, patches)
            before(scaler, *args, **kwargs)

        return init

    def _around_scale(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled():
                self._gradients.scaled = True  # this scaler checks the gradients of the next backward
                if self._last is None or self._last() is not scaler:
                    self._last = weakref.ref(scaler)
            return before(scaler, *args, **kwargs)

        return scale

    def _around_step(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # `step` calls the optimizer's own only if no gradient is bad (torch/amp/grad_scaler.py, _maybe_opt_step).
            # So the count of steps, which our hooks of the optimizer raise, tells a step that was skipped.
            number = self._progress.step
            result = before(scaler, optimizer, *args, **kwargs)
            self._stepped(scaler, optimizer, number)
            return result

        return step

    def _around_update(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            # after `update` the next backward has another scale, or none: `scale` marks it
            self._gradients.scaled = False
            return before(scaler, *args, **kwargs)

        return update

    def _stepped(self, scaler: Any, optimizer: Any, step: int) -> None:
        """`scaler.step(optimizer)` has returned. A fused optimizer is always called and skips the update by itself.

        `step` is the number of optimizer steps before.
        """
        if not scaler.is_enabled():
            return
        with self._progress.faults.within("GradScaler"), self._progress.lock:
            self.collect()
            found_inf, self._steps.found_inf = self._steps.found_inf, None
            # set on the optimizer by GradScaler.step for its kernel, which then skips the update by itself
            if found_inf is not None:
                # `get_scale` and `.item()` would wait for the device in each step: a fused optimizer exists to avoid
                # that
                copy = to_host(found_inf, scaler._get_scale_async())  # does not wait
                if copy is not None:
                    self._unknown.append(_UnknownStep(copy, optimizer, step))
                self.collect()
            elif self._progress.step == step:
                self._judging.finish()  # the scaler has waited for the device itself
                self.collect()
                self._skipped(optimizer, step, float(scaler.get_scale()))
            else:
                self._not_skipped(optimizer, step)
        self._judging.raise_pending()

    def collect(self) -> bool:
        """Handle the steps whose `found_inf` has arrived. True when none is outstanding.

        A step is handled only after its gradients have arrived: they may come from another stream.
        """
        if not self._unknown and not self._not_read:
            return True
        self._judging.collect()
        while self._not_read and not self._judging.is_late(self._not_read[0]):
            self._read_loss(self._not_read.pop(0))
        # in the order of the steps: "in a row" counts them
        while self._unknown and self._unknown[0].copy.arrived() and not self._judging.is_late(self._unknown[0].step):
            first = self._unknown.pop(0)
            found_inf, scale = first.copy.numbers
            if found_inf:
                self._skipped(first.optimizer, first.step, scale)
            else:
                self._not_skipped(first.optimizer, first.step)
        return not self._unknown and not self._not_read

    def _not_skipped(self, optimizer: Any, step: int) -> None:
        self._in_a_row.pop(id(optimizer), None)
        if self._judging.is_late(step):
            self._not_read.append(step)
        else:
            self._read_loss(step)

    def _read_loss(self, step: int) -> None:
        """Raise the alarm of a scaled loss that was not finite: a step was not skipped, so its gradients were."""
        bad = self._judging.take_scaled(step)
        if bad is not None and bad.frame.phase == FramePhase.LOSS and not may_be_scaling(bad.row):
            self._judging.alarm(bad)

    def _skipped(self, optimizer: Any, step: int, scale: float) -> None:
        bad = self._judging.take_scaled(step)
        if bad is None:  # it is in no watched module, or unscaling made it non-finite
            without_modes(self._steps.take_scaled_gradients, optimizer)
            bad = self._judging.take_scaled(step)
        known = self._in_a_row.get(id(optimizer))
        # the weak reference tells another optimizer from one that is gone and had the same id
        in_a_row = (known[1] if known is not None and known[0]() is optimizer else 0) + 1
        self._in_a_row[id(optimizer)] = weakref.ref(optimizer), in_a_row
        self._skips += 1
        self._progress.fields[HeadField.SCALER_SKIPS] = self._skips
        if self._skips <= _MAX_SKIPS:
            self._judging.skipped(bad, scale, in_a_row)
        if bad is not None and (in_a_row >= self._limit or scale < COLLAPSED):
            times = f"{in_a_row} step{'s' if in_a_row != 1 else ''} in a row"
            self._judging.alarm(bad, f"GradScaler skipped {times}, the last at scale {scale:g}")
