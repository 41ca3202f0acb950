"""GradScalers: inf in the gradients of a step that they skip is expected, until it never ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from ...core.recorder.layout import Field
from ..record.judging import Judging
from ..record.progress import Progress
from ..stats.to_host import ToHost, to_host
from ..without_modes import without_modes
from .backward import Gradients
from .optimizer import Steps

COLLAPSED = 1.0
"""A scale below this makes gradients smaller than they are: the scaler has nothing left to give."""
_MAX_SKIPS = 64


class _Late(NamedTuple):
    """Whether a fused optimizer has skipped its step: on its way from the device."""

    answer: ToHost
    """found_inf and the scale."""
    optimizer: Any
    step: int
    """Optimizer steps before it."""


class Scalers:
    """Watches `scale`, `step` and `update` of every GradScaler, by standing around these methods.

    The classes have one wrapper at most, however many watch: it is put in for the first and taken out after the last.
    """

    _watchers: ClassVar[list[Scalers]] = []
    _originals: ClassVar[dict[tuple[type, str], Any]] = {}

    def __init__(
        self,
        progress: Progress,
        judging: Judging,
        gradients: Gradients,
        steps: Steps,
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self._progress = progress
        self._judging = judging
        self._gradients = gradients
        self._steps = steps
        self._on_fault = on_fault
        self._limit = progress.settings.scaler_skips
        self._in_a_row: dict[int, int] = {}
        """id of an optimizer -> steps of its that were skipped since its last one."""
        self._skips = 0
        self._late: list[_Late] = []

    def attach(self) -> None:
        """Stand around the methods."""
        if not self._watchers:
            self._wrap(GradScaler, "__init__", _made)
            self._wrap(GradScaler, "step", _step)
            self._wrap_all(GradScaler)
        self._watchers.append(self)

    def detach(self) -> None:
        """Put the methods back as they were, if nobody else watches."""
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
        """A class with methods of its own, such as FSDP's, does not call those of its base."""
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
        """A scaler has stepped an optimizer, or not. A fused optimizer is always called, and skips by itself.

        `step` is the number of optimizer steps before.
        """
        if not scaler.is_enabled():
            return
        try:
            self.look()
            found_inf, self._steps.found_inf = self._steps.found_inf, None
            if found_inf is not None:
                self._ask(found_inf, scaler, optimizer, step)
                self.look()
            elif self._progress.step == step:
                self._judging.finish()  # the scaler has waited for the device itself
                self._skipped(optimizer, step, float(scaler.get_scale()))
            else:
                self._not_skipped(optimizer, step)
        except Exception as error:
            self._on_fault("GradScaler", error)
        self._judging.raise_pending()

    def _ask(self, found_inf: torch.Tensor, scaler: Any, optimizer: Any, step: int) -> None:
        """Have a fused optimizer's answer brought to the host without waiting for it."""
        answer = to_host(found_inf, scaler._get_scale_async())
        if answer is not None:
            self._late.append(_Late(answer, optimizer, step))

    def look(self) -> bool:
        """Take what has arrived. True when nothing more is on its way.

        An answer waits for the gradients that it is about: they may come by another stream.
        """
        if not self._late:
            return True
        self._judging.collect()
        while self._late and self._late[0].answer.arrived() and not self._judging.is_late(self._late[0].step):
            late = self._late.pop(0)
            found, scale = late.answer.numbers
            if found:
                self._skipped(late.optimizer, late.step, scale)
            else:
                self._not_skipped(late.optimizer, late.step)
        return not self._late

    def _not_skipped(self, optimizer: Any, step: int) -> None:
        self._in_a_row.pop(id(optimizer), None)
        self._judging.take_scaled(step)

    def _skipped(self, optimizer: Any, step: int, scale: float) -> None:
        bad = self._judging.take_scaled(step)
        if bad is None:  # of no module that is watched, or unscaled into something else
            without_modes(self._steps.take_scaled_gradients, optimizer)
            bad = self._judging.take_scaled(step)
        in_a_row = self._in_a_row[id(optimizer)] = self._in_a_row.get(id(optimizer), 0) + 1
        self._skips += 1
        self._progress.fields[Field.SCALER_SKIPS] = self._skips
        if self._skips <= _MAX_SKIPS:
            self._judging.skipped(bad, scale, in_a_row)
        if bad is not None and (in_a_row >= self._limit or scale < COLLAPSED):
            times = f"{in_a_row} step{'s' if in_a_row != 1 else ''} in a row"
            self._judging.alarm(bad, f"GradScaler skipped {times}, its scale is down to {scale:g}")


# The wrappers: `original` is the method that they stand around.


def _made(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> None:
    for cls in type(scaler).__mro__:  # a class that was imported after we were attached
        if issubclass(cls, GradScaler):
            Scalers._wrap_class(cls)
    original(scaler, *args, **kwargs)


def _scale(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    if scaler.is_enabled():
        for watcher in Scalers._watchers:  # the backward that follows is looked at by this scaler
            watcher._gradients.scaled = True
    return original(scaler, *args, **kwargs)


def _step(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    before = [(watcher, watcher._progress.step) for watcher in Scalers._watchers]
    result = original(scaler, optimizer, *args, **kwargs)
    for watcher, step in before:
        watcher._stepped(scaler, optimizer, step)
    return result


def _update(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    for watcher in Scalers._watchers:
        watcher._gradients.scaled = False
    return original(scaler, *args, **kwargs)
