"""Bad values that lead nowhere as far as is known: of a weight without a gradient, of a model that nothing trains.

a weight that no output shows          an alarm once it has a gradient; a notice when its root's others have one
a metric, a teacher, without gradients a notice; and the first cause, if something else is bad in the same step
a copy, with gradients                 an alarm when a backward reaches it; else a notice
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...core.events import LedNowhere
from ...core.frames import Frame, Row
from ...core.recorder.writer import OpenPage
from .trained import TrainedModules

_MOST = 64


class NonFiniteRow(NamedTuple):
    """A non-finite row, with its frame and page."""

    page: OpenPage
    frame: Frame
    row: Row


class HeldAlarm:
    """What is held back from an alarm."""

    def __init__(
        self,
        trained: TrainedModules,
        alarm: Callable[[NonFiniteRow], None],
        notice: Callable[[NonFiniteRow, LedNowhere], None],
        has_run: Callable[[int], bool],
        step: Callable[[], int],
        *,
        with_gradients: bool,
    ) -> None:
        self._trained = trained
        self._with_gradients = with_gradients
        """Gradients are watched."""
        self._alarm = alarm
        self._notice = notice
        self._has_run = has_run
        """Whether a backward has reached what the root of the page of this number has returned."""
        self._step = step
        """Optimizer steps finished so far."""
        self._weights: list[NonFiniteRow] = []
        self._models: list[NonFiniteRow] = []
        """Of models with parameters, since the last step."""
        self._apart: NonFiniteRow | None = None
        """The first of this step."""
        self._untrained: set[tuple[int, str, str]] = set()
        """(root, module, role) of weights that were told,"""
        self._told: set[tuple[int, str, str]] = set()
        """and of what models returned."""

    # -- weights --------------------------------------------------------------------------------------------------

    def weight(self, bad: NonFiniteRow) -> bool:
        """A weight is bad, and what its call returned is not, or no call did. Whether that is no alarm now."""
        page, frame, row = bad
        trained = self._trained.weight(page, frame, row.role) if self._with_gradients else True
        if trained is None and len(self._weights) < _MOST:
            if frame.outputs:
                self._weights.append(bad)
            return True
        if trained or trained is None:
            return False
        if not frame.outputs and self._trained.was_called(page, frame) and _place(bad) not in self._untrained:
            return False  # it was finite in the forward
        self._tell_of_weight(bad)
        return True

    def _tell_of_weight(self, bad: NonFiniteRow) -> None:
        self._untrained.add(_place(bad))
        self._notice(bad, "no gradient")

    def gradients_are_known(self) -> None:
        """A backward has ended: the weights that are trained have a gradient."""
        waiting, self._weights = self._weights, []
        for bad in waiting:
            trained = self._trained.weight(bad.page, bad.frame, bad.row.role)
            if trained is None:
                self._weights.append(bad)
            elif trained:
                self._alarm(bad)
            else:
                self._tell_of_weight(bad)

    # -- models ---------------------------------------------------------------------------------------------------

    def returned(self, bad: NonFiniteRow, called: Frame) -> bool:
        """The script is handed a bad value by the call `called` of a model. Whether that is no alarm now."""
        page = bad.page
        if not self._trained.is_apart(page, called) or self._has_run(page.number) or len(self._models) >= _MOST:
            return False
        is_new = _place(bad) not in self._told
        if self._trained.has_parameters(page, called) and self._step() == page.step:
            self._models.append(bad)
        elif page.with_gradients and self._step() == page.step:  # it may be the loss
            return False
        else:
            self._tell_of_model(bad)
        if is_new and (self._apart is None or self._apart.page.step != page.step):
            self._apart = bad
        return True

    def _tell_of_model(self, bad: NonFiniteRow) -> None:
        self._told.add(_place(bad))
        self._notice(bad, "not trained")

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, and no gradient was an alarm: what models returned before did not lead there."""
        self._trained.noticed(optimizer)
        models, self._models = self._models, []
        for bad in models:
            self._tell_of_model(bad)

    def backward_begins(self, page: int) -> None:
        """A backward has reached what the model of this page has returned."""
        reached = [bad for bad in self._models if bad.page.number == page]
        self._models = [bad for bad in self._models if bad.page.number != page]
        for bad in reached:
            self._alarm(bad)

    def cause_of(self, bad: NonFiniteRow) -> NonFiniteRow | None:
        """What was held back earlier in the same step: this alarm may come of it."""
        held = self._apart
        if held is None or held.page.step != bad.page.step or held.page.number >= bad.page.number:
            return None  # a device's numbers come late: a row of the step in an earlier page may be judged first
        self._apart = None
        return held

    def batch_ended(self, page: OpenPage) -> None:
        """The next batch of this root begins."""
        weights = self._weights
        self._weights = [bad for bad in weights if bad.page is not page]
        for bad in weights:  # no backward has gone through this model: what it holds is what it is for
            if bad.page is page:
                self._alarm(bad)

    def script_ended(self) -> None:
        """No backward and no step comes any more."""
        waiting = [*self._weights, *self._models]
        self._weights, self._models = [], []
        for bad in waiting:
            self._alarm(bad)


def _place(bad: NonFiniteRow) -> tuple[int, str, str]:
    return bad.page.root, bad.frame.module, bad.row.role
