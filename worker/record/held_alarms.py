"""Bad values without a known effect on the training: in a weight without a gradient, in a model that is not trained.

core/judge.py has said that they are bad. They are held back here until it is known whether they matter:

    a weight, whose module has returned     an alarm once a gradient of it was recorded; a notice once other weights of
    finite values                           its model have gradients and it has none
    what a model returns that no optimizer  an alarm when a backward reaches it; a notice at the next optimizer step
    holds (a metric, a teacher, a copy)     without that. If something else is bad in the same step, this one is
                                            recorded before it, as its possible cause
    what is not known by then               an alarm: of a weight when the next batch of its model begins, of a model
                                            when the script ends
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ...core.events.alarms import LedNowhere
from ...core.frames import Frame, Row
from ...core.recorder.writer import OpenPage
from ...core.roles import GRADIENTS, RoleKind, is_param_group
from ...core.signal_errors import suppress_own
from ..patches import PatchLedger
from .names import parameters_of
from .progress import RunProgress
from .roots import ModuleInfo, RankRoots, has_any

# Which models and weights the script trains, as far as it is known when a value is bad.
#
# Used for bad values alone. A recorded gradient is the proof. Before the first one, the optimizers that were made since
# the hooks were attached show it.


class TrainedModules:
    """Which calls and weights of a rank belong to a module that is trained."""

    def __init__(self, roots: RankRoots) -> None:
        self._roots = roots
        self._apart: dict[tuple[int, str], weakref.ref[nn.Module] | None] = {}
        """(root, module) -> a module that no optimizer holds; None if it was gone by then."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._noticed: Callable[[], Optimizer | None] = lambda: None
        """The last one."""

    def attach(self, patches: PatchLedger) -> None:
        """Notice optimizers from now on."""
        patches.replace(Optimizer, "__init__", self._around_init)

    def _around_init(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            before(optimizer, *args, **kwargs)
            self.noticed(optimizer)

        return init

    def noticed(self, optimizer: Any) -> None:
        """Note an optimizer that was made, or steps. One that cannot be held weakly is ignored, without an error."""
        if self._noticed() is optimizer:
            return
        with suppress_own(Exception):
            self._optimizers.add(optimizer)
            self._noticed = weakref.ref(optimizer)

    def is_apart(self, page: OpenPage, called: Frame) -> bool:
        """Whether nothing trains the module that the script has called: a metric, a teacher, a copy.

        False if the script trains no other module: then the outputs of the model are its purpose.
        """
        key = (page.root, called.module)
        if has_any(self._within(page, called), GRADIENTS):
            return False
        module = self._roots.find(page.root, called.module, called.cls)[1]
        known = self._apart.get(key)
        if known is not None and known() is not module and module is not None:  # another one of its class
            del self._apart[key]
        if key not in self._apart:
            held = self._held()
            # a module that is gone has never had a gradient
            if held and (module is None or not any(id(each) in held for each in parameters_of(module))):
                self._apart[key] = weakref.ref(module) if module is not None else None
        return key in self._apart

    def has_parameters(self, page: OpenPage, called: Frame) -> bool:
        """Whether the module that the script has called has parameters of its own, or in a module in it."""
        found = self._within(page, called)
        return has_any(found, (RoleKind.WEIGHT,))

    def weight(self, page: OpenPage, frame: Frame, role: str) -> bool | None:
        """Whether a weight gets gradients; None if no gradient of its root has been seen so far."""
        known = self._roots.infos[page.root].definitions
        info = known.get((frame.module, frame.cls))
        if info is None or f"grad {role}" in info.slots or is_param_group(frame.module):
            return True
        return False if has_any(known.values(), GRADIENTS) else None

    def was_called(self, page: OpenPage, frame: Frame) -> bool:
        """Whether a call of the module of this frame was recorded."""
        info = self._roots.infos[page.root].definitions.get((frame.module, frame.cls))
        return info is None or has_any((info,), (RoleKind.OUTPUT,))

    def _within(self, page: OpenPage, called: Frame) -> list[ModuleInfo]:
        name, known = called.module, self._roots.infos[page.root].definitions.values()
        return [info for info in known if not name or info.name == name or info.name.startswith(f"{name}.")]

    def _held(self) -> set[int]:
        """Ids of the parameters of all optimizers that live."""
        groups = [group for each in list(self._optimizers) for group in getattr(each, "param_groups", ())]
        return {id(parameter) for group in groups for parameter in group["params"]}


_MOST = 64


class NonFiniteRow(NamedTuple):
    """A non-finite row, with its frame and page."""

    page: OpenPage
    frame: Frame
    row: Row


@dataclass(eq=False, repr=False)
class HeldAlarm:
    """Rows that are not finite and raise no alarm yet."""

    _trained: TrainedModules
    _progress: RunProgress
    _alarm: Callable[[NonFiniteRow], None]
    _notice: Callable[[NonFiniteRow, LedNowhere], None]
    _has_run: Callable[[int], bool]
    """Whether a backward has reached the outputs of the root of the page with this number."""

    def __post_init__(self) -> None:
        self._with_gradients = "grads" in self._progress.settings.watch
        self._weights: list[NonFiniteRow] = []
        self._models: list[NonFiniteRow] = []
        """Rows of models with parameters, since the last step."""
        self._apart: NonFiniteRow | None = None
        """The first of this step."""
        self._untrained: set[tuple[int, str, str]] = set()
        """(root, module, role) of weights that were noticed"""
        self._told: set[tuple[int, str, str]] = set()
        """(root, module, role) of bad values that models returned and that were noticed"""

    # -- weights --------------------------------------------------------------------------------------------------

    def weight(self, bad: NonFiniteRow) -> bool:
        """Whether a bad weight is no alarm now. Its call returned finite values, or it was not called."""
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
        """Whether a bad value that the call `called` of a model returns to the script is no alarm now."""
        page = bad.page
        if not self._trained.is_apart(page, called) or self._has_run(page.number) or len(self._models) >= _MOST:
            return False
        is_new = _place(bad) not in self._told
        if self._trained.has_parameters(page, called) and self._progress.step == page.step:
            self._models.append(bad)
        elif page.with_gradients and self._progress.step == page.step:  # it may be the loss
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
        """Notice the held outputs of models: an optimizer has stepped, and no backward had reached them."""
        self._trained.noticed(optimizer)
        models, self._models = self._models, []
        for bad in models:
            self._tell_of_model(bad)

    def backward_begins(self, page: int) -> None:
        """Raise the held alarms of a model whose outputs a backward has reached."""
        reached = [bad for bad in self._models if bad.page.number == page]
        self._models = [bad for bad in self._models if bad.page.number != page]
        for bad in reached:
            self._alarm(bad)

    def cause_of(self, bad: NonFiniteRow) -> NonFiniteRow | None:
        """The row that was held back earlier in the same step: it may be the cause of this alarm."""
        held = self._apart
        if held is None or held.page.step != bad.page.step or held.page.number >= bad.page.number:
            return None  # a device's numbers arrive late: a row of the step in an earlier page may be judged first
        self._apart = None
        return held

    def batch_ended(self, page: OpenPage) -> None:
        """The next batch of this root begins."""
        weights = self._weights
        self._weights = [bad for bad in weights if bad.page is not page]
        for bad in weights:  # no backward has gone through this model: its outputs are its purpose
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
