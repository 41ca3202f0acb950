"""Optimizer steps: the gradients before a step, the weights after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...core.events.own_limits import UnreadStates
from ...core.frames import FramePhase, RowMark
from ...core.recorder.layout import HeadField, RankPhase
from ...core.recorder.writer import OpenPage
from ...core.roles import param_group
from ..compile.attach import CompiledRegions, apart_from_dynamo
from ..device.device import is_on_device, without_modes
from ..patches import PatchLedger
from ..record.bad_elements import KeptSummands
from ..record.collectives import ranks
from ..record.frame_writer import FrameWriter
from ..record.recorded_row import RecordedRow
from ..record.roots import ModuleInfo, RootInfo
from ..record.tensor_stats import measure
from .backward import BackwardHooks
from .global_hooks import GlobalHooks
from .hook_bounds import compiler, is_dynamo_compiling
from .last_pre_hook import LastPreHook
from .loose_parameters import Loose, LooseReader
from .optimizer_steps import ModuleParameters, OptimizerSteps, by_module, has_gradient
from .rpc_optimizer import RpcOptimizers, ScriptedOptimizer


@dataclass(eq=False, repr=False)
class OptimizerHooks:
    """Records gradients before every optimizer step and weights after it."""

    _frames: FrameWriter
    _gradients: BackwardHooks
    _graphs: CompiledRegions
    _global: GlobalHooks
    _summands: KeptSummands
    _is_part: bool
    """One model is watched: optimizers without any of its parameters are not guarded."""

    def __post_init__(self) -> None:
        self._progress, self._roots = self._frames.progress, self._frames.roots
        self._rows, self._judging = self._frames.rows, self._frames.judging
        self._before_faults = self._progress.faults.within("before the optimizer step")
        self._after_faults = self._progress.faults.within("after the optimizer step")
        settings = self._progress.settings
        self._recorder = self._progress.recorder
        self._guard = settings.guard_optimizer
        self._continues = settings.on_overflow == "continue"
        self._grads = "grads" in settings.watch
        self._weights = "weights" in settings.watch
        self.steps = OptimizerSteps(self._frames)
        self._last_hook = LastPreHook(apart_from_dynamo(self.right_before))
        self.found_inf: torch.Tensor | None = None
        """`found_inf` of the last fused optimizer that stepped. A GradScaler sets it; not 0 means skip the step."""
        self._loose: Loose = []
        """Parameters of the optimizer that steps which belong to no module that was called. Kept for the step alone."""
        self.loose_reader = LooseReader(self._frames)
        self._grouped: ModuleParameters | None = None
        """The parameters of the optimizer that steps, as they were before the step."""
        faults = self._progress.faults.within("an optimizer of RPC")
        self._of_rpc = RpcOptimizers(self._before_scripted, self._step_ended, self._count, faults)

    def attach(self, patches: PatchLedger) -> None:
        """See the steps of RPC as well, which torch's hooks do not see."""
        patches.at_undo(self.loose_reader.detach)
        patches.at_undo(self._last_hook.detach)
        self._of_rpc.attach(patches)

    # -- before -------------------------------------------------------------------------------------------------

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A step begins. Records the gradients, or has `right_before` do it after the pre-hooks of others.

        Raises OverflowDetected if the job is to end. Returns what `right_before` returns.
        """
        if is_dynamo_compiling() or compiler["_is_compiling_flag"]:
            return None
        if self._progress.kept:
            self._progress.raise_kept()
        self.steps.begins(optimizer)
        self._grouped, self._loose = None, []
        self.found_inf = getattr(optimizer, "found_inf", None)
        with self._before_faults:
            # the hooks of module calls may be gone, and then no call puts them back
            self._global.reinstall()
            with self._progress.lock:
                self._graphs.record()
                if self._rows.device_buffer is not None:
                    self._judging.collect()
                    self._gradients.release()
            self._progress.times.optimizer_begins()
            self._progress.enter(RankPhase.OPTIMIZER)
            self._last_hook.take(optimizer)
            if not self._global.are_last_before_step(optimizer):
                self._last_hook.put(optimizer)
                return None
        return self.right_before(optimizer, args, kwargs)

    def right_before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record the gradients as the optimizer gets them. Raises OverflowDetected if the job is to end.

        Returns new arguments for the step if its closure must be guarded, else None.
        """
        if is_dynamo_compiling() or compiler["_is_compiling_flag"]:
            return None
        self._check_gradients(optimizer)
        return self._with_guard(optimizer, args, kwargs) if self._guard else None

    def _before_scripted(self, optimizer: ScriptedOptimizer) -> None:
        """An optimizer of RPC's steps in a thread of RPC. Nothing is raised there: the next hook of a module raises."""
        self._progress.times.optimizer_begins()
        self._progress.enter(RankPhase.OPTIMIZER)
        self.steps.begins(optimizer)
        self._grouped = None
        if self._grads and not self._progress.skipped:
            with self._progress.lock:
                without_modes(self._record_gradients, optimizer)

    def _check_gradients(self, optimizer: Any) -> None:
        if self._guard or (self._grads and not self._progress.skipped):
            with self._before_faults:
                with self._progress.lock:
                    bad = without_modes(self._record_gradients, optimizer)
                if self._summands.is_on:
                    self._judging.finish()  # what went into their reduction is kept until the batch ends
                self._judging.held.gradients_are_known()
                if bad and self._guard and self._continues:
                    optimizer.zero_grad(set_to_none=True)  # a parameter without a gradient is not updated
        if self._judging.pending is not None:
            self._judging.raise_pending()
        self._gradients.given.forget()  # the step is about to free and to take memory

    def _with_guard(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A closure computes the gradients within the step: check them when it returns."""
        # args[0] is the optimizer: torch hands over the arguments of the method as a function (optimizer.py,
        # profile_hook_step)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None

        def guarded() -> Any:
            result = closure()
            self._check_gradients(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    def _record_gradients(self, optimizer: Any) -> bool:
        """Write frames of the gradients that were not recorded in the backward, or have changed since.

        True if the guard is on and one of them is an alarm. The guard waits for their numbers.
        """
        # a reduction over ranks leaves a gradient's version as it is: with several ranks all gradients are read again
        reduced, given = ranks() > 1, optimizer.gradients if isinstance(optimizer, ScriptedOptimizer) else None
        mark = RowMark.SCALED if hasattr(optimizer, "found_inf") else 0  # a fused optimizer skips by itself
        written: list[tuple[OpenPage, int]] = []
        self._loose = []
        self._grouped = by_module(self._roots, optimizer, self._loose)
        writer = None if reduced or self._guard or given is not None else self._gradients.writer
        # one launch on a device for all of them
        with self._rows.together():
            for page, info, parameters in self._with_pages(self._grouped):
                if writer is not None and writer.all_local(parameters):
                    continue
                self._rows.count_in(page.batch)
                rows: list[RecordedRow] = []
                for name, parameter in parameters:
                    gradient = parameter.grad if given is None else given.get(id(parameter))
                    if gradient is not None and (reduced or self._guard or not self._gradients.is_local(gradient)):
                        rows.append(self._rows.gradient(info, f"grad {name}", gradient, mark))
                if rows:
                    written.append((page, self._frames.put(page, info, FramePhase.COLLECTIVE, rows)))
        self._rows.flush()
        if not self._guard or given is not None:
            return False
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if not self._is_part or any(map(self._roots.owner_of, held)):
            written += self._record_unwatched(optimizer, mark)
        self._judging.finish()
        return any(self._judging.judge_again(page, index).alarm is not None for page, index in written)

    def _record_unwatched(self, optimizer: Any, mark: int) -> list[tuple[OpenPage, int]]:
        """The guard also reads gradients outside of all watched modules. Only non-finite ones get a frame."""
        written: list[tuple[OpenPage, int]] = []
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                owner = self._roots.owner_of(parameter)
                if parameter.grad is None:
                    continue
                if owner is not None and owner[0].watched and owner[0].root.page is not None:
                    continue  # frames of its module are written
                numbers = measure(parameter.grad)
                if not numbers.meta & 0xFF:
                    continue
                if owner is not None:
                    info, role = owner[0], f"grad {owner[1]}"
                else:
                    name, cls = param_group(index), type(optimizer).__name__
                    info, role = self._roots.place(name, self._progress.root, cls), f"grad params[{position}]"
                page = self._resume(info) or self._progress.begin_page(info.root)
                row = self._rows.gradient(info, role, parameter.grad, mark, numbers)
                written.append((page, self._frames.put(page, info, FramePhase.COLLECTIVE, [row])))
        return written

    # -- after --------------------------------------------------------------------------------------------------

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the weights. Raises OverflowDetected if the job is to end."""
        if is_dynamo_compiling() or compiler["_is_compiling_flag"]:
            return
        self._step_ended(optimizer)
        if self._judging.pending is not None:
            self._judging.raise_pending()

    def _count(self) -> None:
        progress = self._progress
        progress.step += 1
        progress.fields[HeadField.STEP] = progress.step
        progress.times.step_ends(progress.step)

    def _step_ended(self, optimizer: Any) -> None:
        progress = self._progress
        self._count()
        if self._weights and not progress.skipped:
            with self._after_faults:
                self.steps.add(optimizer)
                with progress.lock:
                    without_modes(self._record_weights, optimizer)
        with progress.lock:
            with self._after_faults:
                self._last_hook.take(optimizer)
                progress.groups.notice()  # what DDP has issued in the backward
                self._judging.held.stepped(optimizer)
            self._recorder.pause_page()
        progress.enter(RankPhase.SCRIPT)

    def _record_weights(self, optimizer: Any) -> None:
        # fused kernels write into a parameter without a new version (torch/optim/adam.py, _fused_adam, torch 2.13)
        self._rows.forget()
        written: dict[tuple[int, int], ModuleInfo] = {}
        grouped, self._grouped = self._grouped, None
        loose, self._loose = self._loose, []
        if not grouped:
            loose = []
            grouped = by_module(self._roots, optimizer, loose)
        with self._rows.together():
            for page, info, parameters in self._with_pages(grouped):
                if self._rows.device_buffer is not None:
                    written[page.number, self._recorder.frame_count] = info
                if self._gradients.writer is not None and self._gradients.writer.weights(
                    info, parameters, self._progress.step
                ):
                    continue
                rows: list[RecordedRow] = []
                for name, parameter in parameters:
                    row = self._rows.weight(info, name, parameter, self._progress.step)
                    rows.append(row)
                    if row.flags:
                        rows += self.steps.beside(info, name, optimizer, parameter, has_gradient(optimizer, parameter))
                self._frames.put(page, info, FramePhase.OPTIMIZER, rows)
        if loose and not self._is_part:
            self.loose_reader.after_step(optimizer, loose)
        self.steps.wrote(optimizer, grouped, written)
        if not self._rows.is_capturing and self.steps.states.is_due(optimizer):
            self._record_states(optimizer, grouped)
        self._rows.flush()

    def _record_states(self, optimizer: Any, grouped: ModuleParameters) -> None:
        with self._rows.together():
            for page, info, parameters in self._with_pages(grouped):
                self.steps.put_low_precision(optimizer, page, info, parameters)

    def read_the_rest(self) -> None:
        """Read the weights and the states that no hook has read so far. Waits for no device.

        Raises the error of a device that has failed, and nothing else.

        No forward follows the last batch. A step that torch.compile made a graph of calls no hook, and neither does a
        script that changes its weights itself: what these leave behind would be read by nobody.
        """
        if self._rows.is_capturing:
            return
        for read in (self._record_unread_states, self._record_changed_weights):
            with self._after_faults, self._progress.lock:
                with self._recorder.aside():
                    without_modes(read)
                    self._rows.flush()
        with self._after_faults, self._progress.lock:
            self._rows.look_at_unfinished()
            for name, steps in self.steps.states.take_gone():
                self._recorder.append(UnreadStates(self._progress.where(), name.rpartition(".")[2], steps))

    def _record_unread_states(self) -> None:
        """Those of low precision after the last step so far."""
        for optimizer in self.steps.states.unread():
            self._record_states(optimizer, by_module(self._roots, optimizer))

    def _record_changed_weights(self) -> None:
        """Those that have changed since they were last read."""
        if not self._weights:
            return
        changed: ModuleParameters = {}
        for held, info, name in list(self._roots.parameters.values()):
            parameter = held()
            if parameter is not None and self._rows.weight_has_changed(parameter):
                changed.setdefault(info, []).append((name, parameter))
        with self._rows.together():
            for page, info, parameters in self._with_pages(changed):
                rows = [self._rows.weight_again(info, name, each, self._progress.step) for name, each in parameters]
                if any(row.flags or row.pending for row in rows):
                    self._frames.put(page, info, FramePhase.OPTIMIZER, rows)

    # -- both ---------------------------------------------------------------------------------------------------

    def _with_pages(
        self, grouped: ModuleParameters
    ) -> Iterator[tuple[OpenPage, ModuleInfo, list[tuple[str, torch.Tensor]]]]:
        """(page, module, its parameters): each module whose root has a page, which is continued."""
        root: RootInfo | None = None
        page: OpenPage | None = None
        for info, parameters in grouped.items():
            if info.root is not root:
                root, page = info.root, self._resume(info)
            if page is not None:
                yield page, info, parameters

    def _resume(self, info: ModuleInfo) -> OpenPage | None:
        """Continue the last page of the module's root; None if it has none yet."""
        page = info.root.page
        if page is not None:
            self._progress.resume(page)
        return page

    def take_scaled_gradients(self, optimizer: Any) -> None:
        """After a step that a GradScaler skipped: record the optimizer's first non-finite gradient.

        Only gradients in host memory are read. Those on a device were recorded before the step.
        """
        for info, parameters in by_module(self._roots, optimizer).items():
            page = self._resume(info)
            for name, parameter in parameters:
                gradient = parameter.grad
                if gradient is None or page is None or is_on_device(gradient):
                    continue
                numbers = measure(gradient)
                if numbers.meta & 0xFF:
                    row = self._rows.gradient(info, f"grad {name}", gradient, RowMark.SCALED, numbers)
                    self._frames.put(page, info, FramePhase.COLLECTIVE, [row])
                    return
