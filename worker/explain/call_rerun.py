"""Runs one call once more on the same inputs, with everything put back, and tells what made the value."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from ...core.events.alarm_evidence import (
    NOTHING,
    SAMPLES,
    SECOND_RUN_S,
    BadOperation,
    CaptureFile,
    CauseTrial,
    OddSamples,
    PossibleLine,
)
from ...core.frames import FramePhase
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.writer import OpenPage
from ...core.signal_errors import from_outside
from ..device.device import without_modes
from ..record.held_alarms import NonFiniteRow
from ..record.names import walk
from ..record.progress import RunProgress
from .capture import ForwardCapture
from .forward_thread import ContextMaker, ForwardTarget, ForwardThread, kept_as_it_is
from .kept_call import KeptCall, redirection
from .odd_samples import odd_samples, with_others
from .operation_trials import trial_of
from .operation_watch import OperationWatch
from .possible_lines import LineageWatch, LineThread, first_bad, read_before

_MOST_BEFORE = 16
"""Batches before the alarm's that are looked at."""
NOT_DISPATCHED = "no operation that torch dispatches made it"


def names_in(call: KeptCall, run: nn.Module) -> dict[int, str]:
    """id of a module in the one that a call runs -> its name in the root."""
    return {id(part): ".".join(filter(None, (call.info.name, inner))) for inner, part in walk(run)}


class RerunResult(NamedTuple):
    """What a second run of a forward has shown."""

    operation: BadOperation | None = None
    why: str = ""
    """Why it shows no operation, as a clause."""
    is_open: bool = False
    """A call around this one may show it."""


class CallRerun:
    """The runs of calls within one time limit, and what they have found."""

    def __init__(self, progress: RunProgress, without_ours: Callable[[Callable[[], None]], None]) -> None:
        """`without_ours` runs a function while no global hook of gpuwatch is there."""
        self._progress, self._without_ours = progress, without_ours
        settings = progress.settings
        tests = settings.explain != "off"
        self.capture = ForwardCapture(settings.capture, settings.capture_max, progress.rank, is_tested=tests)
        self._captures = bool(settings.capture)
        self.limit_s = SECOND_RUN_S
        """For all its runs together."""
        self.odd: OddSamples | None = None
        self.trials: list[CauseTrial] = []

    def forward(
        self,
        call: KeptCall,
        run: nn.Module,
        target: ForwardTarget,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        eager: ContextMaker,
        page: OpenPage,
    ) -> RerunResult:
        """Run a forward up to the value. `tensors`: those in its arguments; `page`: that of the alarm."""
        watch = OperationWatch(call.info.name, names_in(call, run), call.site)
        watch.tries = True
        forward = ForwardThread(run, call.method, target, args, kwargs, watch)
        contexts = [*call.contexts, eager]
        self.run_once(call, run, forward, watch, contexts)
        why = forward.why
        if watch.changed or watch.has_changed(tensors):
            why = why or "its call changes an input or a buffer in place"
        elif not why or forward.lacked_memory:
            self.write(call, run, args, kwargs)
        if not why and call.random is not None and forward.seen is not None:
            self.trials.append(without_modes(trial_of, [forward.seen], "forward", NOTHING))
        if not why and not forward.reached:
            why = "a second run of the forward did not make it again"
        if not why and forward.operation is None:
            return RerunResult(why=f"{NOT_DISPATCHED} in a call that could run again", is_open=True)
        if not why:
            try:
                self._run_without_odd_samples(call, run, target, args, kwargs, contexts, forward.seen, page)
            except Exception as error:  # no memory for the copies: the operation is known all the same
                if from_outside(error):
                    raise
                self.trials.append(CauseTrial("forward", SAMPLES, note=f"it raised {type(error).__name__}"))
        return RerunResult(None if why else forward.operation, why)

    def lines(
        self,
        call: KeptCall,
        run: nn.Module,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        eager: ContextMaker,
        bad: NonFiniteRow,
    ) -> list[PossibleLine]:
        """The lines that may have made the value of an alarm in a module: the forward runs with what is there now.

        [] if that shows nothing.
        """
        frames = OwnPages(self._progress.recorder).frames(bad.page)
        row = next((first_bad(frame, frames) for frame in frames if frame.index == bad.frame.index), None)
        if row is None:
            return []
        target = ForwardTarget(module, row)
        read, calls_before = read_before(bad.frame, frames)
        names = names_in(call, run)
        watch = LineageWatch(call.info.name, names, call.site)
        thread = LineThread(run, call.method, target, args, kwargs, watch, names, read, calls_before)
        self.run_once(call, run, thread, watch, [*call.contexts, eager])
        return [] if thread.why else thread.lines

    def run_once(
        self,
        call: KeptCall,
        run: nn.Module,
        forward: ForwardThread,
        watch: OperationWatch,
        contexts: list[ContextMaker],
    ) -> None:
        """Run a forward and put everything back. What it takes counts against the limit of all runs together."""
        began = time.monotonic()

        def go() -> None:
            if (own := redirection(run).get("original_forward")) is not None:  # the job ends in its next call
                vars(run)["forward"] = own
            forward.run(self.limit_s, contexts)

        self._without_ours(partial(kept_as_it_is, run, watch, call.random, go))
        self.limit_s = max(0.0, self.limit_s - (time.monotonic() - began))

    def _run_without_odd_samples(
        self,
        call: KeptCall,
        run: nn.Module,
        target: ForwardTarget,
        args: Any,
        kwargs: Any,
        contexts: list[ContextMaker],
        seen: torch.Tensor | None,
        page: OpenPage,
    ) -> None:
        """Run the forward again with the samples replaced that stand out from the others of its batch.

        And once more as it was: what depends on how often it runs would be finite for another reason.
        """
        name = call.info.name
        odd = without_modes(odd_samples, name, args, kwargs, seen) if seen is not None else None
        if odd is None:
            return
        self.odd = replace(odd, before=self._largest_before(name, odd.role, page))
        for changed, inputs in ((SAMPLES, without_modes(with_others, odd, args, kwargs)), (NOTHING, (args, kwargs))):
            watch = OperationWatch("", {}, None)
            forward = ForwardThread(run, call.method, target, *inputs, watch)
            self.run_once(call, run, forward, watch, contexts)
            if forward.why or forward.seen is None:
                trial = CauseTrial("forward", changed, note=forward.why or "the tensor did not come again")
            else:
                trial = without_modes(trial_of, [forward.seen], "forward", changed)
            self.trials.append(trial)
            if trial.value != "finite":
                return

    def _largest_before(self, module: str, role: str, alarmed: OpenPage) -> float | None:
        """abs max of what a module was handed in the batches before that the recorder still holds."""
        own = OwnPages(self._progress.recorder)
        rows = [
            row
            for page in own.before(alarmed)[-_MOST_BEFORE:]
            for frame in own.frames(page)
            if frame.phase == FramePhase.FORWARD and frame.module == module
            for row in frame.inputs
            if row.role == role and row.finite and row.abs_max is not None
        ]
        return max((row.abs_max or 0.0 for row in rows), default=None)

    def write(self, call: KeptCall, run: nn.Module, *inputs: Any) -> None:
        """Write the call to a file, with --capture."""
        if self._captures and call.method != "forward":
            self.capture.result = CaptureFile(refused=f"`{call.method}` ran, and a capture is of a forward")
        elif self._captures:
            took_s = self.capture.write(run, call.info.name, inputs, call.contexts, call.random, self.limit_s)
            self.limit_s = max(0.0, self.limit_s - took_s)
