"""GradScalers: inf in the gradients of a step that they skip is expected, until it never ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler

from ..core.recorder.layout import Field
from ..core.records import ScalerSkip
from ..core.values import NonFinite, name_of
from .gradients import Gradients
from .policy import Policy, Sighting
from .progress import Progress
from .steps import Steps
from .unseen import unseen

COLLAPSED = 1.0
"""A scale below this makes gradients smaller than they are: the scaler has nothing left to give."""
_MAX_SKIPS = 64


class Scalers:
    """Watches `scale`, `step` and `update` of every GradScaler, by standing around these methods."""

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
        self._in_a_row = 0
        self._skips = 0
        self._originals: dict[str, Any] = {}

    def attach(self) -> None:
        """Stand around the methods."""
        watcher = self

        def scale(scaler: Any, outputs: Any) -> Any:
            watcher._begins(scaler)
            return watcher._originals["scale"](scaler, outputs)

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = watcher._progress.step
            result = watcher._originals["step"](scaler, optimizer, *args, **kwargs)
            watcher._stepped(scaler, optimizer, watcher._progress.step == before)
            return result

        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            watcher._gradients.scaled = False
            return watcher._originals["update"](scaler, *args, **kwargs)

        for around in (scale, step, update):
            original = getattr(GradScaler, around.__name__)
            self._originals[around.__name__] = original
            setattr(GradScaler, around.__name__, functools.wraps(original)(around))

    def detach(self) -> None:
        """Put the methods back as they were."""
        for name, original in self._originals.items():
            setattr(GradScaler, name, original)

    def _begins(self, scaler: Any) -> None:
        """A loss is scaled: the backward that follows is looked at by this scaler."""
        if scaler.is_enabled():
            self._gradients.scaled = True

    def _stepped(self, scaler: Any, optimizer: Any, skipped: bool) -> None:
        if not scaler.is_enabled():
            return
        sighting, self._gradients.first_scaled = self._gradients.first_scaled, None
        if not skipped:
            self._in_a_row = 0
            return
        try:
            self._skipped(sighting or unseen(self._steps.first_bad_gradient, optimizer), float(scaler.get_scale()))
        except Exception as error:
            self._on_fault("GradScaler", error)
        self._policy.raise_pending()

    def _skipped(self, sighting: Sighting | None, scale: float) -> None:
        self._in_a_row += 1
        self._skips += 1
        self._progress.fields[Field.SCALER_SKIPS] = self._skips
        if self._skips <= _MAX_SKIPS:
            self._progress.recorder.append(
                ScalerSkip(
                    self._progress.where(sighting.page if sighting is not None else None),
                    scale,
                    self._in_a_row,
                    sighting.info.name if sighting is not None else None,
                    sighting.info.cls if sighting is not None else None,
                    sighting.role if sighting is not None else None,
                    name_of(NonFinite(sighting.row.flags)) if sighting is not None else None,
                )
            )
        if sighting is not None and (self._in_a_row >= self._limit or scale < COLLAPSED):
            times = f"{self._in_a_row} step{'s' if self._in_a_row != 1 else ''} in a row"
            self._policy.alarm(sighting, f"GradScaler skipped {times}, its scale is down to {scale:g}")
