"""GradScalers: inf in the gradients of a step that they skip is expected, until it never ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from ...core.recorder.layout import Field
from ...core.records import ScalerSkip
from ...core.values import NonFinite, name_of
from ..record.policy import NonFiniteRow, Policy
from ..record.progress import Progress
from ..without_modes import without_modes
from .backward import Gradients
from .optimizer import Steps

COLLAPSED = 1.0
"""A scale below this makes gradients smaller than they are: the scaler has nothing left to give."""
_MAX_SKIPS = 64


class _Late(NamedTuple):
    """Whether a fused optimizer has skipped its step: on its way from the device."""

    numbers: torch.Tensor
    """Pinned: found_inf, scale."""
    arrived: torch.cuda.Event
    optimizer: int
    bad_row: NonFiniteRow | None


class Scalers:
    """Watches `scale`, `step` and `update` of every GradScaler, by standing around these methods.

    The classes have one wrapper at most, however many watch: it is put in for the first and taken out after the last.
    """

    _watchers: ClassVar[list[Scalers]] = []
    _originals: ClassVar[dict[tuple[type, str], Any]] = {}

    def __init__(
        self,
        progress: Progress,
        policy: Policy,
        gradients: Gradients,
        steps: Steps,
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self._progress = progress
        self._policy = policy
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

    def _stepped(self, scaler: Any, optimizer: Any, skipped: bool) -> None:
        """A scaler has stepped an optimizer, or not. A fused optimizer is always called, and skips by itself."""
        if not scaler.is_enabled():
            return
        bad_row, self._gradients.first_scaled = self._gradients.first_scaled, None
        try:
            self.look()
            found_inf, self._steps.found_inf = self._steps.found_inf, None
            if found_inf is not None and found_inf.is_cuda:
                self._ask(found_inf, scaler, optimizer, bad_row)
                return
            if found_inf is not None:
                skipped = bool(found_inf.item())
            if skipped:
                if bad_row is None:
                    bad_row = without_modes(self._steps.first_bad_gradient, optimizer)
                self._skipped(id(optimizer), bad_row, float(scaler.get_scale()))
            else:
                self._in_a_row.pop(id(optimizer), None)
        except Exception as error:
            self._on_fault("GradScaler", error)
        self._policy.raise_pending()

    def _ask(self, found_inf: torch.Tensor, scaler: Any, optimizer: Any, bad_row: NonFiniteRow | None) -> None:
        """Have the answer brought from the device without waiting for it."""
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad():
            both = torch.stack((found_inf.reshape(()).float(), scaler._get_scale_async().reshape(()).float()))
            numbers = torch.empty(2, pin_memory=True)
            numbers.copy_(both, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation there
        arrived.record()
        self._late.append(_Late(numbers, arrived, id(optimizer), bad_row))

    def look(self) -> bool:
        """Take what has arrived. True when nothing more is on its way."""
        while self._late and self._late[0].arrived.query():  # type: ignore[no-untyped-call]  # likewise
            late = self._late.pop(0)
            found, scale = late.numbers.tolist()
            if found:
                self._skipped(late.optimizer, late.bad_row, scale)
            else:
                self._in_a_row.pop(late.optimizer, None)
        return not self._late

    def _skipped(self, optimizer: int, bad_row: NonFiniteRow | None, scale: float) -> None:
        in_a_row = self._in_a_row[optimizer] = self._in_a_row.get(optimizer, 0) + 1
        self._skips += 1
        self._progress.fields[Field.SCALER_SKIPS] = self._skips
        if self._skips <= _MAX_SKIPS:
            self._progress.recorder.append(
                ScalerSkip(
                    self._progress.where(bad_row.page if bad_row is not None else None),
                    scale,
                    in_a_row,
                    bad_row.info.name if bad_row is not None else None,
                    bad_row.info.cls if bad_row is not None else None,
                    bad_row.role if bad_row is not None else None,
                    name_of(NonFinite(bad_row.row.flags)) if bad_row is not None else None,
                )
            )
        if bad_row is not None and (in_a_row >= self._limit or scale < COLLAPSED):
            times = f"{in_a_row} step{'s' if in_a_row != 1 else ''} in a row"
            self._policy.alarm(bad_row, f"GradScaler skipped {times}, its scale is down to {scale:g}")


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
        watcher._stepped(scaler, optimizer, watcher._progress.step == step)
    return result


def _update(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    for watcher in Scalers._watchers:
        watcher._gradients.scaled = False
    return original(scaler, *args, **kwargs)
