"""Optimizer steps: the gradients before a step, the weights after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ...core.events import OptimizerStep
from ...core.frames import Frame, Phase, RowMark
from ...core.recorder.layout import NOTHING, HeadField, RankPhase
from ...core.recorder.writer import OpenPage
from ...core.roles import param_group, parse_role
from ..compile.attach import CompiledRegions
from ..patches import PatchLedger
from ..record.alarm_frames import FrameWriter
from ..record.collectives import ranks
from ..record.held_alarms import NonFiniteRow
from ..record.judging import AlarmRecorder
from ..record.progress import RunProgress
from ..record.roots import ModuleInfo, RankRoots, RootInfo
from ..record.rows import RecordedRow, RowWriter
from ..stats.device import is_on_device
from ..stats.tensor_stats import measure
from ..stats.without_modes import without_modes
from .backward import BackwardHooks
from .global_hooks import GlobalHooks
from .loose_parameters import Loose, LooseReader
from .optimizer_steps import OptimizerSteps
from .rpc_optimizer import RpcOptimizers, ScriptedOptimizer

# The optimizer's states that are kept in 16 bits or less: which steps read them, and which tensors they are.
#
# A square of a gradient overflows in float16 long before the gradient does. Adam's update is then 0 for good, its
# weights stay finite, and the training stops without a sign. A state in float32 is not read.


class LowPrecisionState:
    """Counts the steps of each optimizer. Its first one is read, and from there one in `every`; 0 reads none."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._until: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Optimizer -> its steps until one is read."""

    def is_due(self, optimizer: Any) -> bool:
        """Count a step that has ended. True if the states are to be read after it."""
        if not self._every:
            return False
        until = self._until.get(optimizer, 0)
        self._until[optimizer] = (until or self._every) - 1
        return until == 0


def low_precision_states(optimizer: Any, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(what the optimizer calls it, tensor) of each state of a parameter in 16 bits or less."""
    held = optimizer.state.get(parameter)
    for key, value in list(held.items()) if isinstance(held, dict) else ():
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype.itemsize <= 2:
            yield str(key), value


_Parameters = dict[ModuleInfo, list[tuple[str, torch.Tensor]]]


class _LastStep(NamedTuple):
    """The last step of an optimizer."""

    optimizer: Callable[[], Any]
    """Weak reference to it."""
    written: dict[tuple[int, int], ModuleInfo]
    """(page, frame) -> module."""
    without_gradient: frozenset[int]
    """ids of parameters that had none."""


class OptimizerHooks:
    """Records gradients before every optimizer step and weights after it."""

    def __init__(
        self,
        progress: RunProgress,
        rows: RowWriter,
        roots: RankRoots,
        frames: FrameWriter,
        judging: AlarmRecorder,
        gradients: BackwardHooks,
        graphs: CompiledRegions,
        global_hooks: GlobalHooks,
        on_fault: Callable[[str, Exception], None],
        is_part: bool = False,
    ) -> None:
        """`is_part`: one model is watched, and optimizers without any of its parameters are not guarded."""
        settings = progress.settings
        self._progress = progress
        self._recorder = progress.recorder
        self._rows = rows
        self._roots = roots
        self._frames = frames
        self._judging = judging
        self._gradients = gradients
        self._graphs = graphs
        self._global = global_hooks
        self._is_part = is_part
        self._on_fault = on_fault
        self._guard = settings.guard_optimizer
        self._continues = settings.on_overflow == "continue"
        self._grads = "grads" in settings.watch
        self._weights = "weights" in settings.watch
        self.steps = OptimizerSteps()
        self._states = LowPrecisionState(settings.state_every)
        judging.optimizer_of = self._optimizer_of
        self.found_inf: torch.Tensor | None = None
        """`found_inf` of the last fused optimizer that stepped. A GradScaler sets it; not 0 means skip the step."""

        self._loose: Loose = []
        """Of the optimizer that steps: parameters that no module has that was called. Kept for the step alone."""
        self._loose_reader = LooseReader(progress, rows, roots, frames)
        self._grouped: _Parameters | None = None
        """The parameters of the optimizer that steps, as they were before the step."""
        self._last_step: dict[int, _LastStep] = {}
        """By id of the optimizer. Only for frames whose numbers arrive later."""
        judging.on_bad_weight = self._record_state
        self._of_rpc = RpcOptimizers(self._before_scripted, self._step_ended, self._count, on_fault)

    def attach(self, patches: PatchLedger) -> None:
        """See the steps of RPC as well, which torch's hooks do not see."""
        patches.at_undo(self._loose_reader.detach)
        self._of_rpc.attach(patches)

    # -- before -------------------------------------------------------------------------------------------------

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record the gradients as the optimizer gets them. Raises OverflowDetected if the job is to end.

        Returns new arguments for the step if its closure must be guarded, else None.
        """
        if torch.compiler.is_compiling():
            return None
        try:
            self._global.put_back()
            with self._progress.lock:
                self._graphs.take()
                self._judging.collect()
                self._gradients.let_go()
        except Exception as error:
            self._on_fault("before the optimizer step", error)
        self._progress.times.optimizer_begins()
        self._progress.enter(RankPhase.OPTIMIZER)
        self._last_step.pop(id(optimizer), None)
        self._grouped, self._loose = None, []
        self.found_inf = getattr(optimizer, "found_inf", None)
        self._check_gradients(optimizer)
        return self._with_guard(optimizer, args, kwargs) if self._guard else None

    def _before_scripted(self, optimizer: ScriptedOptimizer) -> None:
        """An optimizer of RPC's steps in a thread of RPC. Nothing is raised there: the next hook of a module raises."""
        self._progress.times.optimizer_begins()
        self._progress.enter(RankPhase.OPTIMIZER)
        self._last_step.pop(id(optimizer), None)
        self._grouped = None
        if self._grads and not self._progress.skipped:
            with self._progress.lock:
                without_modes(self._record_gradients, optimizer)

    def _check_gradients(self, optimizer: Any) -> None:
        if self._guard or (self._grads and not self._progress.skipped):
            try:
                with self._progress.lock:
                    bad = without_modes(self._record_gradients, optimizer)
                if self._judging.held is not None:
                    self._judging.held.gradients_are_known()
                if bad and self._guard and self._continues:
                    optimizer.zero_grad(set_to_none=True)  # a parameter without a gradient is not updated
            except Exception as error:
                self._on_fault("before the optimizer step", error)
        self._judging.raise_pending()

    def _with_guard(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A closure computes the gradients within the step: check them when it returns."""
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
        reduced, given = ranks() > 1, optimizer.gradients if isinstance(optimizer, ScriptedOptimizer) else None
        mark = RowMark.SCALED if hasattr(optimizer, "found_inf") else 0  # a fused optimizer skips by itself
        written: list[tuple[OpenPage, int]] = []
        self._loose = []
        self._grouped = self._by_module(optimizer, self._loose)
        with self._rows.together():
            for page, info, parameters in self._with_pages(self._grouped):
                self._rows.count_in(page.batch)
                may_skip = given is None and not reduced and not self._guard and self._gradients.writer is not None
                if may_skip and self._gradients.writer.all_local(parameters):
                    continue
                rows: list[RecordedRow] = []
                for name, parameter in parameters:
                    gradient = parameter.grad if given is None else given.get(id(parameter))
                    if gradient is not None and (reduced or self._guard or not self._gradients.is_local(gradient)):
                        rows.append(self._rows.gradient(info, f"grad {name}", gradient, mark))
                if rows:
                    written.append((page, self._frames.put(page, info, Phase.COLLECTIVE, rows)))
        self._rows.flush()
        if not self._guard or given is not None:
            return False
        if not (self._is_part and self._is_foreign(optimizer)):
            written += self._record_unwatched(optimizer, mark)
        self._judging.finish()
        return any(self._judging.judge_again(page, index).alarm is not None for page, index in written)

    def _is_foreign(self, optimizer: Any) -> bool:
        groups = optimizer.param_groups
        return not any(self._roots.owner_of(parameter) for group in groups for parameter in group["params"])

    def _record_unwatched(self, optimizer: Any, mark: int) -> list[tuple[OpenPage, int]]:
        """The guard also reads gradients outside of all watched modules. Only non-finite ones get a frame."""
        written: list[tuple[OpenPage, int]] = []
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                owner = self._roots.owner_of(parameter)
                if parameter.grad is None or (owner is not None and self._has_place(owner[0])):
                    continue
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
                written.append((page, self._frames.put(page, info, Phase.COLLECTIVE, [row])))
        return written

    @staticmethod
    def _has_place(info: ModuleInfo) -> bool:
        """Whether frames of this module are written: it is watched, and its root has a page."""
        return info.watched and info.root.page is not None

    # -- after --------------------------------------------------------------------------------------------------

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the weights. Raises OverflowDetected if the job is to end."""
        if torch.compiler.is_compiling():
            return
        self._step_ended(optimizer)
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
            try:
                self.steps.add(progress.step, optimizer)
                with self._progress.lock:
                    without_modes(self._record_weights, optimizer)
            except Exception as error:
                self._on_fault("after the optimizer step", error)
        with self._progress.lock:
            self._tell_of_step(optimizer)
            self._recorder.pause_page()
        progress.enter(RankPhase.SCRIPT)

    def _tell_of_step(self, optimizer: Any) -> None:
        """Tell those that wait for a step."""
        try:
            self._progress.groups.notice()  # what DDP has issued in the backward
            if self._judging.held is not None:
                self._judging.held.stepped(optimizer)
        except Exception as error:
            self._on_fault("after the optimizer step", error)

    def _record_weights(self, optimizer: Any) -> None:
        self._rows.forget()  # an optimizer may change parameters without raising their version
        self._last_step = {key: last for key, last in self._last_step.items() if last.optimizer() is not None}
        written: dict[tuple[int, int], ModuleInfo] = {}
        grouped, self._grouped = self._grouped, None
        loose, self._loose = self._loose, []
        if not grouped:
            loose = []
            grouped = self._by_module(optimizer, loose)
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
                        rows += self._step_rows(info, name, optimizer, parameter, _has_gradient(optimizer, parameter))
                self._frames.put(page, info, Phase.OPTIMIZER, rows)
        if loose and not self._is_part:
            self._loose_reader.after_step(optimizer, loose)
        if written:
            self._last_step[id(optimizer)] = _LastStep(
                weakref.ref(optimizer), written, _without_gradient(optimizer, grouped)
            )
        if not self._rows.is_capturing and self._states.is_due(optimizer):
            self._record_states(optimizer, grouped)
        self._rows.flush()

    def _record_states(self, optimizer: Any, grouped: _Parameters) -> None:
        """Write the states that the optimizer keeps in 16 bits, a frame for each module."""
        with self._rows.together():
            for page, info, parameters in self._with_pages(grouped):
                rows = [
                    self._rows.gradient(info, f"state {key} {name}", state)
                    for name, parameter in parameters
                    for key, state in low_precision_states(optimizer, parameter)
                ]
                if rows:
                    self._frames.put(page, info, Phase.OPTIMIZER, rows)

    def _optimizer_of(self, bad: NonFiniteRow) -> OptimizerStep | None:
        name = bad.row.parsed_role.name
        for reference, info, role in list(self._roots.parameters.values()):
            if info.name == bad.frame.module and info.root.id == bad.page.root and parse_role(role).name == name:
                parameter = reference()
                found = self.steps.find(bad.page.step, parameter) if parameter is not None else None
                if found is not None:
                    return found
        return None

    def _step_rows(
        self, info: ModuleInfo, name: str, optimizer: Any, parameter: torch.Tensor, has_gradient: bool
    ) -> Iterator[RecordedRow]:
        """What a step on a weight that is bad now had beside it: the optimizer's state; that it had no gradient."""
        if not has_gradient:
            yield self._rows.leaf(info, f"state grad {name}", None)  # none of the backward's: `grad` is for these
        for key, value in dict(optimizer.state.get(parameter, {})).items():
            if isinstance(value, torch.Tensor):
                yield self._rows.gradient(info, f"state {key} {name}", value, numbers=measure(value))

    def _record_state(self, page: OpenPage, frame: Frame, role: str) -> None:
        """The numbers of a weight have arrived, and its step made it non-finite: record the optimizer's state.

        The state is still that of this step if the optimizer has not begun another one. This waits for the device.
        """
        buffer = self._rows.device_buffer
        if buffer is None or buffer.is_capturing:
            return
        for last in self._last_step.values():
            optimizer, info = last.optimizer(), last.written.get((page.number, frame.index))
            if optimizer is not None and info is not None:
                without_modes(self._put_state, page, frame, optimizer, info, role, last.without_gradient)

    def _put_state(
        self, page: OpenPage, frame: Frame, optimizer: Any, info: ModuleInfo, role: str, without: frozenset[int]
    ) -> None:
        current = self._recorder.page
        self._recorder.resume_page(page)
        parameters = [parameter for name, parameter in self._by_module(optimizer).get(info, ()) if name == role]
        packed = [
            row.packed
            for parameter in parameters
            for row in self._step_rows(info, role, optimizer, parameter, id(parameter) not in without)
        ]
        if packed:
            self._recorder.frame(info.id, NOTHING, 0, Phase.OPTIMIZER, frame.seq, packed)
        if current is None:
            self._recorder.pause_page()
        else:
            self._recorder.resume_page(current)

    # -- both ---------------------------------------------------------------------------------------------------

    def _by_module(self, optimizer: Any, loose: Loose | None = None) -> _Parameters:
        """The optimizer's parameters by the watched module that holds them. What no module holds goes to `loose`."""
        found: _Parameters = {}
        searched = False
        owners = self._roots.parameters
        parameter: torch.Tensor
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                owner = owners.get(id(parameter))
                if owner is None or owner[0]() is not parameter:
                    if not searched:
                        self._roots.find_parameters()
                        searched = True
                    owner = owners.get(id(parameter))
                    if owner is None or owner[0]() is not parameter:
                        if loose is not None:
                            loose.append((number, position, parameter))
                        continue
                info = owner[1]
                if info.watched:
                    held = found.get(info)
                    if held is None:
                        held = found[info] = []
                    held.append((owner[2], parameter))
        return found

    def _with_pages(
        self, grouped: _Parameters
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
        for info, parameters in self._by_module(optimizer).items():
            page = self._resume(info)
            for name, parameter in parameters:
                gradient = parameter.grad
                if gradient is None or page is None or is_on_device(gradient):
                    continue
                numbers = measure(gradient)
                if numbers.meta & 0xFF:
                    row = self._rows.gradient(info, f"grad {name}", gradient, RowMark.SCALED, numbers)
                    self._frames.put(page, info, Phase.COLLECTIVE, [row])
                    return


def _without_gradient(optimizer: Any, grouped: _Parameters) -> frozenset[int]:
    """ids of the parameters that have none. Called after every step on a device: one pass, and no call in it."""
    lists = grouped.values()
    if isinstance(optimizer, ScriptedOptimizer):
        given = optimizer.gradients
        return frozenset([id(each) for parameters in lists for _, each in parameters if id(each) not in given])
    return frozenset([id(each) for parameters in lists for _, each in parameters if each.grad is None])


def _has_gradient(optimizer: Any, parameter: torch.Tensor) -> bool:
    if isinstance(optimizer, ScriptedOptimizer):
        return id(parameter) in optimizer.gradients
    return parameter.grad is not None
