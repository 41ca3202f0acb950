"""The last optimizer steps of a rank, their settings and states: evidence for a weight that is bad after a step.

An optimizer may keep states in 16 bits or less. A square of a gradient overflows in float16 long before the gradient
does. Adam's update is then 0 for good, its weights stay finite, and the training stops without a sign. A state in
float32 is not read.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...core.events.looked_again import OptimizerStep
from ...core.frames import Frame, FramePhase
from ...core.recorder.writer import OpenPage
from ...core.roles import Role, RoleKind, parse_role
from ..device.device import without_modes
from ..record.frame_writer import FrameWriter
from ..record.held_alarms import NonFiniteRow
from ..record.plain_tensor import local_part
from ..record.recorded_row import RecordedRow
from ..record.roots import ModuleInfo, RankRoots
from ..record.tensor_stats import measure
from .loose_parameters import Loose
from .rpc_optimizer import ScriptedOptimizer

_KEPT = 16
"""Steps. The numbers of a step on a device arrive a batch later, in which several optimizers may step."""

ModuleParameters = dict[ModuleInfo, list[tuple[str, torch.Tensor]]]


class _StepSettings(NamedTuple):
    number: int
    """Steps finished after it."""
    optimizer: weakref.ref[Any]
    groups: list[dict[str, float]]


class _LastStep(NamedTuple):
    optimizer: weakref.ref[Any]
    written: dict[tuple[int, int], ModuleInfo]
    """(page, frame) -> module."""
    without_gradient: frozenset[int]
    """ids of parameters that had none."""


@dataclass(eq=False, repr=False)
class OptimizerSteps:
    """The last steps of a rank."""

    _frames: FrameWriter

    def __post_init__(self) -> None:
        self._progress, self._roots, self._rows = self._frames.progress, self._frames.roots, self._frames.rows
        self._steps: deque[_StepSettings] = deque(maxlen=_KEPT)
        self._last: dict[int, _LastStep] = {}
        """By id of the optimizer. Only for frames whose numbers arrive later."""
        self.states = LowPrecisionState(self._progress.settings.state_every)

    def begins(self, optimizer: Any) -> None:
        """Its states are those of the step before no more."""
        self._last.pop(id(optimizer), None)

    # -- settings -----------------------------------------------------------------------------------------------

    def add(self, optimizer: Any) -> None:
        """Remember the settings of the step that has just ended. Waits for no device."""
        # copied: a scheduler changes `lr` in the same dictionaries before a device's numbers arrive
        groups = [_numbers(group) for group in optimizer.param_groups]
        self._steps.append(_StepSettings(self._progress.step, weakref.ref(optimizer), groups))

    def last(self) -> OptimizerStep | None:
        """The last step, with the settings of its first parameter group; None before the first."""
        if not self._steps:
            return None
        _, reference, groups = self._steps[-1]
        optimizer = reference()
        if optimizer is None:
            return None
        return OptimizerStep(_name_of(optimizer), groups[0] if groups else {})

    def last_optimizer(self) -> Any:
        """The optimizer that has stepped last; None if it is gone."""
        return self._steps[-1].optimizer() if self._steps else None

    def optimizer_of(self, bad: NonFiniteRow) -> OptimizerStep | None:
        """The first step on the weight of a row after its batch; None if it is not known."""
        name = bad.row.parsed_role.name
        for reference, info, role in list(self._roots.parameters.values()):
            if info.name == bad.frame.module and info.root.id == bad.page.root and parse_role(role).name == name:
                parameter = reference()
                found = self._find(bad.page.step, parameter) if parameter is not None else None
                if found is not None:
                    return found
        return None

    def _find(self, since: int, parameter: torch.Tensor) -> OptimizerStep | None:
        for number, reference, groups in self._steps:
            optimizer = reference()
            if number <= since or optimizer is None:
                continue
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                if any(held is parameter for held in group["params"]):
                    return OptimizerStep(_name_of(optimizer), settings)
        return None

    # -- the first bad element ----------------------------------------------------------------------------------

    def tensor_of(self, parameter: torch.Tensor, role: Role) -> torch.Tensor | None:
        """The tensor that a row of the last step on a parameter is about: itself, or a state."""
        if role.kind is not RoleKind.STATE:
            return parameter
        found = [state.get(role.key) for _, _, state in self._last_on(parameter)]
        return found[0] if found and isinstance(found[0], torch.Tensor) else None

    def update_of(self, parameter: torch.Tensor) -> str:
        """What the last step had for the first bad element of a weight: `exp_avg 0, eps 0: 0/0 at [3, 5]`.

        Waits for a device. "" if the step is not known, or the weight is finite again. Of a DTensor: of its shard.
        """
        weight = local_part(parameter.detach())
        bad = ~torch.isfinite(weight)
        for optimizer, settings, state in self._last_on(parameter):
            if not bad.any():
                break
            index = tuple(int(place) for place in bad.nonzero()[0])
            held = {"gradient": parameter.grad, **state}.items()
            parts = {name: local_part(each.detach()) for name, each in held if isinstance(each, torch.Tensor)}
            numbers = {
                name: float((each[index] if each.shape == weight.shape else each).item())
                for name, each in parts.items()
                if each.shape == weight.shape or each.numel() == 1
            }
            numbers |= {name: settings[name] for name in ("lr", "momentum", "eps") if name in settings}
            texts = ", ".join(f"{name} {number:.3g}" for name, number in numbers.items())
            ratio = _ratio_of(numbers) if type(optimizer).__module__.startswith("torch.optim") else ""
            return f"{texts}{f': {ratio}' if ratio else ''} at {list(index)}"
        return ""

    def _last_on(self, parameter: torch.Tensor) -> Iterator[tuple[Any, dict[str, float], dict[str, Any]]]:
        """(optimizer, settings of the group, its state) of the last steps on a parameter, the latest first."""
        for _, reference, groups in reversed(self._steps):
            optimizer = reference()
            for group, settings in zip(getattr(optimizer, "param_groups", ()), groups, strict=False):
                if any(held is parameter for held in group["params"]):
                    state = optimizer.state.get(parameter)
                    yield optimizer, settings, state if isinstance(state, dict) else {}

    # -- states -------------------------------------------------------------------------------------------------

    def put_low_precision(
        self, optimizer: Any, page: OpenPage, info: ModuleInfo, parameters: list[tuple[str, torch.Tensor]]
    ) -> None:
        """Write a frame of the states that the optimizer keeps in 16 bits for the parameters of a module."""
        rows = [
            self._rows.gradient(info, f"state {key} {name}", state)
            for name, parameter in parameters
            for key, state in low_precision_states(optimizer, parameter)
        ]
        if rows:
            self._frames.put(page, info, FramePhase.OPTIMIZER, rows)
            self.states.were_read(optimizer)

    def wrote(self, optimizer: Any, grouped: ModuleParameters, written: dict[tuple[int, int], ModuleInfo]) -> None:
        """A step has ended, and the weights in these frames ((page, frame) -> module) arrive later from a device."""
        # an id of a freed optimizer may be another's next
        self._last = {key: last for key, last in self._last.items() if last.optimizer() is not None}
        if written:
            self._last[id(optimizer)] = _LastStep(
                weakref.ref(optimizer), written, _without_gradient(optimizer, grouped)
            )

    def beside(
        self, info: ModuleInfo, name: str, optimizer: Any, parameter: torch.Tensor, has_gradient: bool
    ) -> Iterator[RecordedRow]:
        """Rows beside a weight that is bad after a step: the optimizer's state, and a missing gradient."""
        if not has_gradient:
            yield self._rows.leaf(info, f"state grad {name}", None)  # none of the backward's: `grad` is for these
        for key, value in dict(optimizer.state.get(parameter, {})).items():
            if isinstance(value, torch.Tensor):
                yield self._rows.gradient(info, f"state {key} {name}", value, numbers=measure(value))

    def weight_is_bad(self, page: OpenPage, frame: Frame, role: str) -> None:
        """The numbers of a weight have arrived, and its step made it non-finite: record the optimizer's state.

        The state is still that of this step if the optimizer has not begun another one. This waits for the device.
        """
        buffer = self._rows.device_buffer
        if buffer is None or buffer.is_capturing:
            return
        for last in self._last.values():
            optimizer, info = last.optimizer(), last.written.get((page.number, frame.index))
            if optimizer is not None and info is not None:
                without_modes(self._put_state, page, frame, optimizer, info, role, last.without_gradient)

    def _put_state(
        self, page: OpenPage, frame: Frame, optimizer: Any, info: ModuleInfo, role: str, without: frozenset[int]
    ) -> None:
        recorder = self._progress.recorder
        with recorder.aside():
            recorder.resume_page(page)
            parameters = [each for name, each in by_module(self._roots, optimizer).get(info, ()) if name == role]
            packed = [
                row.packed
                for parameter in parameters
                for row in self.beside(info, role, optimizer, parameter, id(parameter) not in without)
            ]
            if packed:
                self._frames.put_unjudged(info.id, FramePhase.OPTIMIZER, frame.seq, packed)


def by_module(roots: RankRoots, optimizer: Any, loose: Loose | None = None) -> ModuleParameters:
    """The optimizer's parameters by the watched module that holds them. Parameters of no module go to `loose`."""
    found: ModuleParameters = {}
    searched = False
    owners = roots.parameters
    last: ModuleInfo | None = None
    held: list[tuple[str, torch.Tensor]] = []
    parameter: torch.Tensor
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            # the weak reference tells a new parameter from a freed one of the same id
            owner = owners.get(id(parameter))
            if owner is None or owner[0]() is not parameter:
                # once for each step: the script may have added parameters to a module since its last call
                if not searched:
                    roots.find_parameters()
                    searched = True
                owner = owners.get(id(parameter))
                if owner is None or owner[0]() is not parameter:
                    if loose is not None:
                        loose.append((number, position, parameter))
                    continue
            _, info, name = owner
            if info is not last:
                last = info
                held = found.setdefault(info, []) if info.watched else []
            held.append((name, parameter))
    return found


@dataclass(eq=False)
class _KeptStates:
    optimizer: weakref.ref[Any]
    name: str
    unread: int = 0
    """Its steps since they were read."""


class LowPrecisionState:
    """Counts the steps of each optimizer. Its first one is read, and from there one in `every`; 0 reads none.

    What an optimizer keeps after its last step is read when the script ends, if the optimizer is still there.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._until: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Optimizer -> its steps until one is read."""
        self._kept: dict[int, _KeptStates] = {}
        """By id of the optimizer: those that keep something in 16 bits or less."""
        self._gone: list[_KeptStates] = []

    def is_due(self, optimizer: Any) -> bool:
        """Count a step that has ended. True if the states are to be read after it."""
        if not self._every:
            return False
        until = self._until.get(optimizer, 0)
        self._until[optimizer] = (until or self._every) - 1
        kept = self._kept.get(id(optimizer))
        if kept is not None and kept.optimizer() is optimizer:
            kept.unread += 1
        return until == 0

    def were_read(self, optimizer: Any) -> None:
        """Its states are read as they are now."""
        before = self._kept.get(id(optimizer))
        if before is not None and before.optimizer() is not optimizer:
            self._gone.append(before)
        self._kept[id(optimizer)] = _KeptStates(weakref.ref(optimizer), _name_of(optimizer))

    def unread(self) -> list[Any]:
        """The optimizers whose states were not read after their last step."""
        found = [kept.optimizer() for kept in list(self._kept.values()) if kept.unread]
        return [optimizer for optimizer in found if optimizer is not None]

    def take_gone(self) -> list[tuple[str, int]]:
        """(name, steps since its states were read) of each optimizer that was freed before they were. Once for each."""
        freed = [key for key, kept in list(self._kept.items()) if kept.optimizer() is None]
        gone, self._gone = [*self._gone, *map(self._kept.pop, freed)], []
        return [(kept.name, kept.unread) for kept in gone if kept.unread]


def low_precision_states(optimizer: Any, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(the optimizer's name of it, tensor) of each state of a parameter in 16 bits or less."""
    held = optimizer.state.get(parameter)
    for key, value in list(held.items()) if isinstance(held, dict) else ():
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype.itemsize <= 2:
            yield str(key), value


_SQUARES = {"exp_avg_sq": "exp_avg", "square_avg": "gradient", "sum": "gradient"}
"""State of Adam and its kin, of RMSprop and of Adagrad -> what is divided by its root."""


def _ratio_of(numbers: dict[str, float]) -> str:
    """`0/0`, or `1e-05/0`; "" if the step has divided by no zero.

    >>> _ratio_of({"gradient": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0, "eps": 0.0})
    '0/0'
    """
    for square, over in _SQUARES.items():
        if (
            square in numbers
            and over in numbers
            and math.sqrt(max(0.0, numbers[square])) + numbers.get("eps", 0.0) == 0
        ):
            return f"{numbers[over]:.3g}/0"
    return ""


def has_gradient(optimizer: Any, parameter: torch.Tensor) -> bool:
    """Whether this step has a gradient of a parameter."""
    if isinstance(optimizer, ScriptedOptimizer):
        return id(parameter) in optimizer.gradients
    return parameter.grad is not None


def _without_gradient(optimizer: Any, grouped: ModuleParameters) -> frozenset[int]:
    """ids of the parameters that have none. Called after every step on a device: one pass, and no call in it."""
    lists = grouped.values()
    if isinstance(optimizer, ScriptedOptimizer):
        given = optimizer.gradients
        return frozenset([id(each) for parameters in lists for _, each in parameters if id(each) not in given])
    return frozenset([id(each) for parameters in lists for _, each in parameters if each.grad is None])


def _name_of(optimizer: Any) -> str:
    """`torch.optim.adamw.AdamW`; one that TorchScript runs has a name of its own (hooks/rpc_optimizer.py)."""
    return getattr(optimizer, "gpuwatch_name", "") or f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The settings of a parameter group that are numbers.

    >>> _numbers({"params": [], "lr": 0.1, "betas": (0.9, 0.99), "fused": None})
    {'lr': 0.1, 'betas[0]': 0.9, 'betas[1]': 0.99}
    """
    found: dict[str, float] = {}
    for key, value in group.items():
        if isinstance(value, tuple):
            for position, part in enumerate(value):
                if isinstance(part, int | float):
                    found[f"{key}[{position}]"] = float(part)
        # a learning rate may be a tensor; one on a device is not read, as that waits for the device
        elif isinstance(value, int | float) or (
            isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
        ):
            found[key] = float(value)
    return found
