"""Runs the forward and the backward of an alarm in a backward once more, and finds the operation and the line.

    loss = out.sqrt().mean(); loss.backward()     the alarm: a gradient within the model is nan
    the model's forward again, with autograd's notes, on the inputs that it had
    its backward from the gradient that `out` was given, up to the nan that raised the alarm

Only the numbers of that backward count: the weights must be as they were, and the same gradient must be bad at the same
places. What the loss has made is not looked for: it is no code of the model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree

from ...core.events.alarm_evidence import BadOperation
from ...core.frames import FramePhase, Row
from ...core.recorder.own_pages import OwnPages
from ...core.roles import RoleKind
from ...core.signal_errors import then_put_back
from ..device.device import without_modes
from ..hooks.backward import BackwardHooks
from ..record.autograd_graph import next_node
from ..record.frame_writer import FrameWriter
from ..record.held_alarms import NonFiniteRow
from ..record.names import buffers_of, parameters_of, unwrap, walk
from ..record.plain_tensor import version_of
from .backward_thread import BackwardTarget, BackwardThread, places_of
from .backward_watch import BackwardWatch, running_node
from .forward_thread import ContextMaker
from .kept_call import KeptCall
from .operation_watch import OperationWatch

T = TypeVar("T")
_COPY_SLICES = "torch::autograd::CopySlices"
_GONE = "the gradient that raised the alarm was gone when that was known"
_NOT_AGAIN = "a second run of the forward and its backward did not make it again"


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """What the second run of a backward has found."""

    operation: BadOperation | None
    why: str
    """Why there is none, as a clause; "" if there is one."""


class _RepeatedWatch(BackwardWatch):  # type: ignore[no-untyped-call]  # torch has no annotation there
    """Notes which module makes each node, as it is made: the node of an operation is the latest when it runs."""

    def __init__(self, module: str, names: dict[int, str]) -> None:
        super().__init__(module, names, None, self._made_in)
        self._numbers: list[int] = []
        self._modules: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = next_node() - 1
        if running_node() is None and (not self._numbers or self._numbers[-1] < number):
            self._numbers.append(number)
            self._modules.append(self._in_python()[0] or self._module)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _made_in(self, number: int) -> str | None:
        """None if that is not certain: a node that torch has made without an operation of its own."""
        place = bisect_right(self._numbers, number) - 1
        node = running_node()
        is_after = node is not None and node.name() == _COPY_SLICES  # made as the operation before it has ended
        return self._modules[place] if place >= 0 and (is_after or self._numbers[place] == number) else None


@dataclass(eq=False, repr=False)
class SecondBackward:
    """The one second run of a backward of a rank."""

    _frames: FrameWriter
    _gradients: BackwardHooks
    _gradient_of: Callable[[NonFiniteRow], torch.Tensor | None]
    """The tensor of a row; None if it is gone."""
    _is_sharded: Callable[[Any], bool]
    """Whether a root gathers its weights."""

    def __post_init__(self) -> None:
        self.given = self._gradients.given
        self._own = OwnPages(self._frames.progress.recorder)
        self._target: BackwardTarget | None = None
        self._why = ""
        self._versions: list[tuple[torch.Tensor, int]] = []

    def expects(self, bad: NonFiniteRow) -> bool:
        """Whether a row is one that a second run may explain. If so, keep what the second run has to make again."""
        kinds = (RoleKind.GRAD_OUTPUT, RoleKind.GRAD_WEIGHT)
        if bad.frame.phase != FramePhase.BACKWARD or bad.row.role_kind not in kinds:
            return False
        self._why = without_modes(self._prepare, bad)
        return True

    def _prepare(self, bad: NonFiniteRow) -> str:
        """Why there is no second run, as a clause; "" if there may be one."""
        gradient = self._gradient_of(bad)
        root, named = self._frames.roots.find(bad.page.root, bad.frame.module, bad.frame.cls)
        if root is None or named is None:
            return "its module was gone"
        if self._is_sharded(self._frames.roots.infos[bad.page.root]):
            return "its model is sharded"
        graphs = [each for each in self._gradients.graphs.of(bad.page.number) if each.within is None]
        if len(graphs) != 1:
            return "the graph of its backward was gone"
        given, why = self._gradients.given.from_outside(graphs[0])
        if why:
            return why
        if any(bool(places_of(each).any()) for each in given.values()):
            return "the gradient that an output of the model was given was not finite"
        places = places_of(gradient) if gradient is not None else None
        frames = (each for each in self._own.frames(bad.page) if each.phase == FramePhase.FORWARD)
        returned: list[Row] = next((each.outputs for each in frames if each.parent is None and each.outputs), [])
        self._target = BackwardTarget(unwrap(named), bad.row, places, given, returned)
        run = unwrap(root)
        self._versions = [(each, version_of(each)) for each in (*parameters_of(run), *buffers_of(run))]
        return ""

    def may_run_within(self) -> bool:
        """Whether it may run before a backward has returned: on a device, autograd's one thread for that may wait."""
        target = self._target
        return target is None or all(each.device.type == "cpu" for each in target.given.values())

    def refusal(self) -> str:
        """Why it does not run now, as a clause; "" if it may."""
        target = self._target
        if target is None or self._why:
            return self._why or _GONE
        if running_node() is not None and not self.may_run_within():
            return "with --sync the alarm was raised within the backward, which waits"
        if any(version_of(each) != version for each, version in self._versions):
            return "a weight or a buffer was changed since"
        return ""

    def run(
        self,
        call: KeptCall,
        module: nn.Module,
        inputs: tuple[Any, Any],
        contexts: list[ContextMaker],
        run_once: Callable[[BackwardThread, OperationWatch, list[ContextMaker]], None],
    ) -> BackwardResult:
        """Run it. `run_once` runs a thread, and puts back what it has changed."""
        target = self._target
        assert target is not None
        parts = list(walk(module))
        if any(part._backward_hooks or part._backward_pre_hooks for _, part in parts) or _has_global_hooks():
            return BackwardResult(None, "the script has hooks on the backward of modules, which would run again")
        if not any(part is target.module for _, part in parts):
            return BackwardResult(None, "its module is no part of the model any more")
        name = call.info.name
        names = {id(part): ".".join(filter(None, (name, inner))) for inner, part in parts}
        watch = _RepeatedWatch(name, names)
        watch.tries = True
        thread = BackwardThread(module, call.method, target, *inputs, watch)
        go = partial(run_once, thread, watch, contexts)
        _with_notes(partial(_without_hooks, [*parameters_of(module)], go))
        why = thread.why
        if watch.changed or watch.has_changed(_tensors(inputs)):
            why = why or "its call changes an input or a buffer in place"
        if not why and not thread.reached:
            why = _NOT_AGAIN
        if not why and target.places is None:
            why = without_modes(_unlike, thread.made)
        if not why and thread.operation is None:
            why = "no operation that torch dispatches in the model's code made it"
        return BackwardResult(None if why else thread.operation, why)


def _unlike(made: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Why the gradients of parameters show another backward than the first, as a clause; "" if they show the same.

    That is so if they are bad at the same places, and at one at least. A clip of the script's spreads nan further.
    """
    found = [(places_of(parameter.grad), places_of(again)) for parameter, again in made if parameter.grad is not None]
    if not any(bool(first.any()) for first, _ in found):
        return _GONE
    return "" if all(torch.equal(first, again) for first, again in found) else _NOT_AGAIN


def _has_global_hooks() -> bool:
    return bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)


def _tensors(inputs: tuple[Any, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def _with_notes(run: Callable[[], T]) -> T:
    """Call `run` while autograd notes where each node is made, and checks nothing."""
    was_on, checked = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def go() -> T:
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        return run()

    return then_put_back(go, partial(torch.autograd.set_detect_anomaly, was_on, checked))


def _without_hooks(parameters: list[nn.Parameter], run: Callable[[], T]) -> T:
    """Call `run` while no parameter has a hook (`Tensor.register_hook`). Then they have the same ones, in order."""
    hooks = [(each, each._backward_hooks) for each in parameters if each._backward_hooks]

    def go() -> T:
        for each, _ in hooks:
            each._backward_hooks = None
        return run()

    def put_back() -> None:
        for each, of_script in hooks:
            each._backward_hooks = of_script

    return then_put_back(go, put_back)
