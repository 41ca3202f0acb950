"""Optimizer steps: the gradients that go in, the weights that come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core.frames import Mark, Phase
from ..core.recorder.layout import NOTHING, Field, RankPhase
from ..core.recorder.writer import OpenPage
from ..core.values import NonFinite
from .collectives import issued, ranks
from .gradients import Gradients
from .measure import measure
from .policy import Policy, Sighting
from .progress import Progress
from .roots import ModuleInfo, Roots
from .rows import Row, Rows
from .unseen import unseen

_Parameters = dict[ModuleInfo, list[tuple[str, torch.Tensor]]]


class Steps:
    """Looks before and after every optimizer's step."""

    def __init__(
        self,
        progress: Progress,
        rows: Rows,
        roots: Roots,
        policy: Policy,
        gradients: Gradients,
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        settings = progress.settings
        self._progress = progress
        self._recorder = progress.recorder
        self._rows = rows
        self._roots = roots
        self._policy = policy
        self._gradients = gradients
        self._on_fault = on_fault
        self._guard = settings.guard_optimizer
        self._continues = settings.on_overflow == "continue"
        self._grads = "grads" in settings.watch
        self._weights = "weights" in settings.watch

    # -- before -------------------------------------------------------------------------------------------------

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look at the gradients as the optimizer gets them. Raises OverflowDetected if the job is to end."""
        if torch.compiler.is_compiling():
            return
        progress = self._progress
        progress.enter(RankPhase.OPTIMIZER)
        if self._guard or (self._grads and not progress.idle):
            try:
                bad = unseen(self._take_gradients, optimizer)
                if bad and self._guard and self._continues:
                    optimizer.zero_grad(set_to_none=True)  # a parameter without a gradient is left as it is
            except Exception as error:
                self._on_fault("before the optimizer step", error)
        self._policy.raise_pending()

    def _take_gradients(self, optimizer: Any) -> bool:
        """Frames of the gradients that were not seen in their backward, or are not the same any more."""
        reduced = ranks() > 1
        mark = Mark.SCALED if hasattr(optimizer, "found_inf") else 0  # a fused optimizer skips by itself
        bad = False
        for info, parameters in self._by_module(optimizer).items():
            rows: list[tuple[str, Row]] = []
            page = self._resume(info)
            for name, parameter in parameters:
                gradient = parameter.grad
                if gradient is None or not (reduced or self._guard or not self._gradients.is_local(gradient)):
                    continue
                role = f"grad {name}"
                if self._guard:
                    row = self._rows.gradient(info, role, gradient, mark, measure(gradient))
                else:
                    row = self._rows.gradient(info, role, gradient, mark)
                rows.append((role, row))
            if rows and page is not None:
                bad |= self._put(info, page, Phase.COLLECTIVE, rows)
        return bad

    # -- after --------------------------------------------------------------------------------------------------

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look at the weights. Raises OverflowDetected if the job is to end."""
        if torch.compiler.is_compiling():
            return
        progress = self._progress
        progress.step += 1
        progress.fields[Field.STEP] = progress.step
        if self._weights and not progress.idle:
            try:
                unseen(self._take_weights, optimizer)
            except Exception as error:
                self._on_fault("after the optimizer step", error)
        self._recorder.pause_page()
        progress.enter(RankPhase.SCRIPT)
        self._policy.raise_pending()

    def _take_weights(self, optimizer: Any) -> None:
        self._rows.forget()  # parameters may have been changed without a new version
        for info, parameters in self._by_module(optimizer).items():
            page = self._resume(info)
            if page is None:
                continue
            rows: list[tuple[str, Row]] = []
            for name, parameter in parameters:
                row = self._rows.weight(info, name, parameter, self._progress.step)
                rows.append((name, row))
                if row.flags:
                    rows += self._state_rows(info, name, optimizer, parameter)
            self._put(info, page, Phase.OPTIMIZER, rows)

    def _state_rows(
        self, info: ModuleInfo, name: str, optimizer: Any, parameter: torch.Tensor
    ) -> Iterator[tuple[str, Row]]:
        for key, value in dict(optimizer.state.get(parameter, {})).items():
            if isinstance(value, torch.Tensor):
                role = f"state {key} {name}"
                yield role, self._rows.gradient(info, role, value)

    # -- both ---------------------------------------------------------------------------------------------------

    def _by_module(self, optimizer: Any) -> _Parameters:
        """The optimizer's parameters under the watched modules that hold them."""
        found: _Parameters = {}
        searched = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self._roots.owner_of(parameter)
                if owner is None and not searched:
                    self._roots.find_parameters()
                    searched = True
                    owner = self._roots.owner_of(parameter)
                if owner is not None and owner[0].watched:
                    found.setdefault(owner[0], []).append((owner[1], parameter))
        return found

    def _resume(self, info: ModuleInfo) -> OpenPage | None:
        """Write on in the last page of the module's root; None if it has none yet."""
        page = info.root.page
        if page is not None:
            self._progress.resume(page)
        return page

    def _put(self, info: ModuleInfo, page: OpenPage, phase: Phase, rows: list[tuple[str, Row]]) -> bool:
        frame = self._recorder.frame(info.id, NOTHING, 0, phase, issued(), [row.packed for _, row in rows])
        bad = False
        for role, row in rows:
            if not row.flags:
                continue
            sighting = Sighting(page, info.root.label, info, frame, phase, role, row)
            if row.packed[5] & Mark.IGNORED:
                self._policy.hidden(sighting)
            elif not row.packed[5] & Mark.SCALED:
                bad = True
                self._policy.alarm(sighting)
        return bad

    def first_bad_gradient(self, optimizer: Any) -> Sighting | None:
        """The first non-finite gradient of an optimizer's parameters: for a step that was skipped."""
        for info, parameters in self._by_module(optimizer).items():
            page = self._resume(info)
            for name, parameter in parameters:
                gradient = parameter.grad
                if gradient is None or page is None:
                    continue
                numbers = measure(gradient)
                if numbers.meta & 0xFF and NonFinite(numbers.meta & 0xFF):
                    role = f"grad {name}"
                    row = self._rows.gradient(info, role, gradient, Mark.SCALED, numbers)
                    frame = self._recorder.frame(info.id, NOTHING, 0, Phase.COLLECTIVE, issued(), (row.packed,))
                    return Sighting(page, info.root.label, info, frame, Phase.COLLECTIVE, role, row)
        return None
