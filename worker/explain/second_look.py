"""Reads the module of an alarm again: its weights, its own shard of them, and its buffers. It waits for the device.

It also reads the attributes of all modules: no frame shows a value that one module leaves in an attribute and another
takes out.

A weight is read once per optimizer step, and a script may change it in between. Under FSDP every rank gathers a weight
from all ranks, so only its own shard identifies the rank that a bad value belongs to. Called only for a rank's first
alarm.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec
import torch
from torch import nn

from ...core.events.looked_again import BadWeight, GraphNode, HeldValue, LookedAgain, OwnCodeModule
from ...core.events.read_tensors import OperandNumbers, ReducedElement, ScriptTensor
from ...core.frames import FramePhase, RowKind, format_number, module_text
from ...core.recorder.own_pages import OwnPages
from ...core.roles import RoleKind, is_param_group, parse_role
from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite, Value, name_of
from ..device.device import without_modes
from ..hooks.call_frames import CallFrames
from ..hooks.grad_scaler import GradScalerHooks
from ..hooks.loose_parameters import LooseReader, loose_parameter
from ..hooks.module_calls import ModuleCalls
from ..hooks.optimizer_steps import OptimizerSteps
from ..record.autograd_graph import AutogradGraph, GraphCalls, running_engine
from ..record.bad_elements import KeptSummands, pattern_of
from ..record.float_formats import FLOATS
from ..record.held_alarms import NonFiniteRow
from ..record.names import buffers_of, class_of, parameters_of
from ..record.plain_tensor import version_of
from ..record.root_tensors import RootTensors
from ..record.roots import is_released, shards_of
from ..record.tensor_stats import TensorStats, measure
from .graph_sources import explaining_row, shown_in, sources_later, sources_now, sources_of_loss
from .graph_users import BadOutput, a_leaf_of, graph_users
from .loss_look import LossLook
from .operands import numbers_of
from .script_tensors import running_frames, script_tensors

_running_node = name_in_torch("torch._C._current_autograd_node", lambda: None)
_AFTER = ModuleCalls.after.__code__
_MOST_CHANGED = 4
_MOST_LOSSES = 4
_MOST = 8
_MOST_HELD = 256
"""Attributes that are measured."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Parameters, buffers, modules and hooks."""
_CONTAINERS = (list, tuple, dict, deque)


@dataclass(eq=False, repr=False)
class SecondLook:
    """Reads the module of a rank's first alarm again."""

    _calls: CallFrames
    _steps: OptimizerSteps
    _scalers: GradScalerHooks
    _root_tensors: RootTensors
    _summands: KeptSummands
    _operations: LossLook
    _loose: LooseReader

    def __post_init__(self) -> None:
        self._running, self._gradients, self._policy = self._calls.running, self._calls.gradients, self._calls.policy
        parts = self._calls.frames
        self._progress, self._roots, self._rows = parts.progress, parts.roots, parts.rows
        self._late_passed, self._masks = parts.judging.passed, parts.judging.masks
        self._own = OwnPages(self._progress.recorder)

    def read(self, bad: NonFiniteRow) -> LookedAgain | None:
        """Read the module of an alarm; None if it is no module, or is gone without a graph."""
        if bad.frame.phase == FramePhase.LOSS:
            return without_modes(self._of_loss, bad)
        if is_param_group(bad.frame.module) and bad.frame.phase == FramePhase.OPTIMIZER:
            return without_modes(self._of_loose, bad)
        root, module = self._roots.find(bad.page.root, bad.frame.module, bad.frame.cls)
        graph = without_modes(self._graph_of, bad)
        if module is None:  # the numbers arrived after the script had ended
            return LookedAgain(same_step=False, graph=graph) if graph else None
        self._late_passed.collect()  # the readings of that call have arrived, too
        found = without_modes(_look_again, root, module)
        same_step = self._progress.step == bad.page.step
        changed, bad_weight = without_modes(self._changed_weights, bad) if same_step else ([], None)
        role, own_code = without_modes(self._own_code_of, bad, module)
        of_backward = bad.frame.phase in ("backward", "collective")
        parameter = self._parameter_of(bad)
        element, update, reduced = without_modes(self._elements_of, bad, parameter)
        return msgspec.structs.replace(
            found,
            **self._beside(bad, self._losses_of(bad) if of_backward else []),
            changed=changed,
            graph=graph,
            bad_weight=bad_weight,
            own_code=own_code,
            own_code_of=role,
            left=of_backward and parameter is not None and self._gradients.left.was_bad(parameter, bad.page.number),
            closed=self._masks.closed_in(bad.page.number, bad.frame.module),
            without_graph=not bad.page.with_gradients and not type(module).__module__.startswith("torch."),
            bad_before=self._root_tensors.bad_buffers(bad.page.root),
            element=element,
            update=update,
            reduced=reduced,
        )

    def _beside(self, bad: NonFiniteRow, losses: list[torch.Tensor]) -> dict[str, Any]:
        """Fields of a LookedAgain: the step and what it has of the script, whatever the alarm is about."""
        values = [without_modes(numbers_of, loss)[0] for loss in losses]
        return {
            "optimizer": self._steps.last(),
            "same_step": self._progress.step == bad.page.step,
            "loss_scale": self._scalers.scale_in_use(),
            "threads": self._running.page_with_threads == bad.page.number,
            "losses": values,
            "script": self._script_of(bad, losses, values),
        }

    def _of_loose(self, bad: NonFiniteRow) -> LookedAgain | None:
        """A parameter of no module after a step: its gradient, and the graph that this was computed with.

        None where the gradient may not be that of one backward: an accumulation, a clip or a hook may have changed it.
        """
        optimizer = self._steps.last_optimizer()
        parameter = loose_parameter(optimizer, bad.frame.module, bad.row.role) if optimizer is not None else None
        gradient = self._loose.gradient_of(parameter) if parameter is not None else None
        if parameter is None or gradient is None:
            return None
        numbers, flags = numbers_of(gradient)
        if not flags:
            return None
        alive = [loss for ref in self._gradients.began_from if (loss := ref()) is not None]
        losses = [loss for loss in alive if loss.grad_fn is not None]
        roots = tuple(loss.grad_fn for loss in losses)
        graph = AutogradGraph(roots, GraphCalls(bad.page.number))
        return LookedAgain(
            optimizer=self._steps.last(),
            graph=graph_users([graph], parameter) if roots else [],
            element=pattern_of(gradient),
            gradient=numbers.value,
            losses=[numbers_of(each)[0] for each in losses],
        )

    def _of_loss(self, bad: NonFiniteRow) -> LookedAgain:
        """The script's variables, and what the loss may have used that no frame shows."""
        graphs = [each for each in self._gradients.graphs.of(bad.page.number) if each.within is None]
        graph = graphs[0] if len(graphs) == 1 else None  # on a device, another backward may have begun since
        shown = shown_in(self._own.frames(bad.page))
        called = [info for info in self._roots.infos if info.page is not None and info.page.step == bad.page.step]
        held = (each for info in called if (root := info.ref()) is not None for each in _held(root))
        return LookedAgain(
            **self._beside(bad, self._losses_of(bad)),
            graph=self._graph_of_loss(graph) if graph is not None else [],
            own_code=sources_of_loss(graph, shown) if graph is not None else [],
            own_code_of=bad.row.role if graph is not None else "",
            proved=self._operations.operation_of(bad) is not None,
            held=list(islice(dict.fromkeys(held), _MOST)),
        )

    def _graph_of_loss(self, graph: AutogradGraph) -> list[GraphNode]:
        """The nodes from the output that the backward has just reached to the loss; empty if it went on since.

        Of a loss that reaches no module: from one of the script's own tensors.
        """
        if not graph.calls.calls:
            leaf = a_leaf_of(graph)
            return graph_users([graph], leaf) if leaf is not None else []
        maker = _running_node()
        call = graph.calls.innermost(maker._sequence_nr()) if maker is not None else None
        return graph_users([graph], BadOutput(call.info.id, None, True, maker)) if call is not None else []

    def _elements_of(self, bad: NonFiniteRow, parameter: torch.Tensor | None) -> tuple[str, str, ReducedElement | None]:
        """Which elements of a gradient, or of a weight after a step, are not finite, and for the first of them what the
        step had, and what this rank had before a reduction.

        Nothing where the tensor is gone or has changed since, as it may have on a device.
        """
        role, update, reduced = parse_role(bad.row.role), "", None
        tensor = self.gradient_of(bad)
        if parameter is not None and bad.frame.phase == "optimizer":
            of_step = self._progress.step <= bad.page.step + 1  # no later one has changed it
            tensor = self._steps.tensor_of(parameter, role) if of_step else None
            if tensor is parameter:
                update = self._steps.update_of(parameter)
        elif bad.frame.phase == "collective" and parameter is not None and tensor is not None:
            reduced = self._summands.first_bad(parameter, tensor)
        return (pattern_of(tensor) if tensor is not None else ""), update, reduced

    def gradient_of(self, bad: NonFiniteRow) -> torch.Tensor | None:
        """The gradient that a row is about, with the numbers of the row; None if it is gone, or may have changed."""
        current = self._gradients.current
        if current is not None or parse_role(bad.row.role).kind is not RoleKind.GRAD_WEIGHT:
            return current
        parameter = self._parameter_of(bad)
        gradient = parameter.grad if parameter is not None else None
        is_reduced = bad.frame.phase == "collective"
        if gradient is not None and not is_reduced and not self._gradients.is_local(gradient):
            return None  # another hook has changed it, or its memory
        return gradient

    def _parameter_of(self, bad: NonFiniteRow) -> torch.Tensor | None:
        """The parameter that a row of a gradient or of a step is about; None if it is about none."""
        role = parse_role(bad.row.role)
        if role.kind not in (RoleKind.GRAD_WEIGHT, RoleKind.WEIGHT, RoleKind.STATE):
            return None
        owned = ((held(), info, parse_role(name).name) for held, info, name in list(self._roots.parameters.values()))
        place = (bad.page.root, bad.frame.module, bad.frame.cls, role.name)
        return next((each for each, info, name in owned if (info.root.id, info.name, info.cls, name) == place), None)

    def _own_code_of(self, bad: NonFiniteRow, module: torch.nn.Module) -> tuple[str, list[OwnCodeModule]]:
        """(role, the modules whose own code made it) of the value that explains an alarm of a forward."""
        page, frame = bad.page, bad.frame
        row = explaining_row(frame)
        # compiled code is one node, and the nodes of another thread have numbers of their own
        if (
            row is None
            or frame.phase != "forward"
            or self._policy.around
            or self._running.page_with_threads == page.number
        ):
            return "", []
        shown = shown_in(self._own.frames(page))
        if self._running.nodes is not None and self._running.nodes.page == page.number:
            calls, running = self._running.nodes, self._running.first_nodes()
            return row.role, sources_now(row, frame.module, module, _AFTER, calls, running, shown)
        graph = next((graph for graph in self._gradients.graphs.of(page.number) if graph.within is None), None)
        return row.role, sources_later(row, frame.module, graph, shown) if graph is not None else []

    def _graph_of(self, bad: NonFiniteRow) -> list[GraphNode]:
        """The nodes that used the tensor whose gradient is bad; empty for other rows, or if unknown."""
        if bad.frame.phase != "backward":
            return []
        graphs = self._gradients.graphs.of(bad.page.number)
        named = (bad.frame.module, bad.frame.cls)
        number = next((i.id for graph in graphs for i, _, _ in graph.calls.calls if (i.name, i.cls) == named), None)
        if number is None:
            return []
        role = parse_role(bad.row.role)
        if role.kind is RoleKind.GRAD_OUTPUT:
            shape = tuple(bad.row.shape) if bad.row.shape is not None else None
            is_late = self._rows.device_buffer is not None and not self._progress.settings.sync
            maker = _running_node() if not is_late else None
            return graph_users(graphs, BadOutput(number, shape, "[" not in role.name, maker))
        parameter = self._parameter_of(bad)
        return graph_users(graphs, parameter) if parameter is not None else []

    def _losses_of(self, bad: NonFiniteRow) -> list[torch.Tensor]:
        """The tensors that the backward began from, as long as they live."""
        graph = next((each for each in self._gradients.graphs.of(bad.page.number) if each.within is None), None)
        began_from = graph.losses if graph is not None else self._gradients.began_from  # it has reached no output yet
        found = [loss() for loss in began_from[:_MOST_LOSSES]]
        return [loss for loss in found if loss is not None]

    def _script_of(
        self, bad: NonFiniteRow, losses: list[torch.Tensor], values: list[OperandNumbers]
    ) -> list[ScriptTensor]:
        """The script's variables, where its own code may have made the value: a loss, or a gradient that it changes
        before the step.

        The loss alone if the numbers arrived later, when the variables may be others. [] if the training goes on:
        Python before 3.13 keeps the variables of a function alive that were asked for, until it returns.
        """
        settings, of_loss = self._progress.settings, bad.frame.phase == FramePhase.LOSS
        if settings.on_overflow != "abort":
            return []
        if self._rows.device_buffer is not None and not settings.sync:
            told = self._operations.variable_of(bad) if of_loss else None
            same_step = self._progress.step == bad.page.step
            if told is None or not (same_step and self._operations.has_not_gone_on(bad, losses, sys._getframe())):
                return [told] if told is not None else []
        if bad.frame.phase in (FramePhase.COLLECTIVE, FramePhase.OPTIMIZER):
            return script_tensors(running_frames(sys._getframe()), waits=True, losses=())
        engine = running_engine() if any(value.is_bad for value in values) else None
        if engine is None and of_loss:
            engine = sys._getframe()  # a GradScaler's step
        if engine is None:
            return []
        nodes = self._operations.nodes_of(bad)
        return script_tensors(running_frames(engine), waits=True, losses=losses, nodes=nodes)

    def _changed_weights(self, bad: NonFiniteRow) -> tuple[list[str], BadWeight | None]:
        """The first few weights that changed since they were last read, and the first of these that is not finite.

        Waits for a device.
        """
        found: list[str] = []
        worst: BadWeight | None = None
        # a page shows gathered weights, which are not those that a rank keeps
        is_shown = self._rows.device_buffer is not None and not self._running.gathers(self._roots.infos[bad.page.root])
        shown = self._weights_up_to(bad) if is_shown else {}
        for reference, info, role in list(self._roots.parameters.values()):
            parameter = reference()
            known = self._rows.weights.get(id(parameter))
            if info.root.id != bad.page.root or parameter is None or known is None or known[0]() is not parameter:
                continue
            _, version, step, numbers = known
            then = _extremes(numbers) if isinstance(numbers, TensorStats) else shown.get((info.name, role))
            if then is None or len(found) == _MOST_CHANGED or parameter.dtype not in FLOATS:
                continue
            if is_released(parameter):  # it was whole when it was read
                continue
            if (version, step) != (version_of(parameter), self._progress.step):  # not read after its last step
                continue
            now = _extremes(measure(parameter))
            if now != then:
                before, after = (_largest(extremes) for extremes in (then, now))
                found.append(f"{role} of {module_text(info.name, info.cls)}, abs max {before} then, {after} now")
                if worst is None and now[2]:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    worst = BadWeight(info.name, info.cls, role, name_of(NonFinite(now[2])), dtype)
        return found, worst

    def _weights_up_to(self, bad: NonFiniteRow) -> dict[tuple[str, str], tuple[float, float, int]]:
        """(module, role) -> (abs min, abs max, flags) of the finite weights in the page's frames up to this one."""
        frames = [self._own.frame(bad.page, index) for index in range(bad.frame.index + 1)]
        return {
            (frame.module, row.role): (row.abs_min, row.abs_max, row.flags)
            for frame in frames
            if frame is not None
            for row in frame.weights
            if row.finite and row.abs_min is not None and row.abs_max is not None
        }


def _extremes(numbers: TensorStats) -> tuple[float | None, float | None, int]:
    """(abs min, abs max, flags) of a tensor; None for nan, so that two of them can be compared."""
    value = Value(*numbers[:3])
    low, high = (None if math.isnan(number) else number for number in (value.abs_min, value.abs_max))
    return low, high, value.meta & 0xFF


def _largest(extremes: tuple[float | None, float | None, int]) -> str:
    """`1.00e+38`, or `nan`."""
    _, largest, flags = extremes
    return format_number(largest).strip() if largest is not None else name_of(NonFinite(flags))


def _look_again(root: nn.Module | None, module: nn.Module) -> LookedAgain:
    own = [(name, each) for name, each in module._parameters.items() if each is not None and not is_released(each)]
    weights = {name: _found(each) for name, each in own[:_MOST]}
    buffers = {name: _found(each) for name, each in list(module._buffers.items())[:_MOST] if each is not None}
    shards = {name: _found(local) for name, local in shards_of(root, module)}
    return LookedAgain(
        weights={name: found for name, found in weights.items() if found},
        shards={name: found for name, found in shards.items() if found},
        buffers={name: found for name, found in buffers.items() if found not in ("", "finite")},
        autocast=_autocast(module),
        computed=[name for name, each in module._parameters.items() if each is not None and each.grad_fn is not None],
        held=list(islice(dict.fromkeys(_held(root)), _MOST)) if root is not None else [],
    )


def _held(root: nn.Module) -> Iterator[HeldValue]:
    """nan or +inf in attributes of all modules. A -inf belongs to a mask, a single inf is a bound or a start value."""
    # DDP lists parameters in an attribute
    own = {id(each) for each in chain(parameters_of(root), buffers_of(root))}
    for name, module, key, tensor in islice(_attributes(root), _MOST_HELD):
        found = _found(tensor) if id(tensor) not in own else ""
        if found not in ("", "finite", "-inf") and not (found == "+inf" and tensor.numel() == 1):
            yield HeldValue(name, class_of(module), key, found)


def _attributes(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(module's name, module, attribute, tensor) of all attributes that are tensors, or hold some in a container."""
    for name, module in root.named_modules():
        for key, value in list(vars(module).items()):
            if key in _OF_TORCH:
                continue
            if isinstance(value, torch.Tensor):
                yield name, module, key, value
            elif isinstance(value, _CONTAINERS):
                inside = value.values() if isinstance(value, dict) else value
                for each in list(islice(inside, _MOST)):
                    if isinstance(each, torch.Tensor):
                        yield name, module, key, each


def _found(tensor: torch.Tensor) -> str:
    """`finite`, `nan`, `+inf`, `-inf`; "" if it cannot be measured."""
    numbers = measure(tensor)
    return name_of(NonFinite(numbers.meta & 0xFF)) if numbers.content is RowKind.MEASURED else ""


def _autocast(module: nn.Module) -> str:
    """The dtype that autocast computes in, where it is on; else ""."""
    device = next((each.device.type for each in module.parameters(recurse=False)), "cpu")
    try:
        on = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""
    except (RuntimeError, TypeError) as error:  # a device without autocast, or torch 2.5
        if from_outside(error):
            raise
        return ""
