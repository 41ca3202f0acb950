"""A forward and its backward that run once more in a thread of their own.

The backward begins from the gradients that the outputs were given, and ends at the parameters and inputs: no gradient
is accumulated, and no hook of a parameter runs.
"""

from __future__ import annotations

import math
import random
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from ...core.events.alarm_evidence import BadOperation
from ...core.frames import Row, RowKind
from ...core.roles import RoleKind, parse_role
from ..device.device import without_modes
from ..hooks.accumulated_gradients import put_first
from ..record.names import outputs_of, parameters_of
from .backward_watch import BackwardWatch
from .forward_thread import ForwardTarget, ForwardThread, random_numbers, same_numbers
from .operands import numbers_of
from .operation_watch import SecondRunStopped

_NAN, _POSINF, _NEGINF = 1, 2, 3


def places_of(gradient: torch.Tensor) -> torch.Tensor:
    """Where it holds nan, +inf and -inf: 1, 2 and 3; 0 elsewhere. uint8, of its shape. Waits for no device."""
    given = gradient.detach()
    found = torch.zeros(given.shape, dtype=torch.uint8, device=given.device)
    for number, value in ((_POSINF, math.inf), (_NEGINF, -math.inf)):
        found.masked_fill_(given == value, number)
    return found.masked_fill_(given.isnan(), _NAN)


class BackwardTarget(NamedTuple):
    """The gradient that was bad: of an output of a module's call, or of a parameter."""

    module: nn.Module
    row: Row
    places: torch.Tensor | None
    """As `places_of` gives them. None: its numbers came when it was gone, and the gradients of parameters decide."""
    given: dict[int, torch.Tensor]
    """Place of an output of the root -> the gradient that it was given."""
    returned: list[Row]
    """The outputs of the root in the first run."""

    @property
    def parameter(self) -> torch.Tensor | None:
        """None: it is the gradient of an output."""
        role = parse_role(self.row.role)
        return self.module._parameters.get(role.name) if role.kind is RoleKind.GRAD_WEIGHT else None

    def is_like(self, gradient: torch.Tensor, flags: int) -> bool:
        """Whether a gradient of the second run holds the same bad values, and at the same places if those are known."""
        if self.places is None:
            return ForwardTarget(self.module, self.row).is_like(gradient, flags)
        return gradient.shape == self.places.shape and torch.equal(places_of(gradient), self.places)


class BackwardThread(ForwardThread):
    """One forward and backward of `module`, under a watch."""

    what = "a second run of the forward and its backward"
    _watch: BackwardWatch

    def __init__(
        self, module: nn.Module, method: str, target: BackwardTarget, args: Any, kwargs: Any, watch: BackwardWatch
    ) -> None:
        super().__init__(module, method, ForwardTarget(target.module, target.row), args, kwargs, watch)
        self._gradient = target
        self._has_looked = False
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(parameter, its gradient) of all that have one."""

    def _call(self) -> None:
        target, inputs, drawn = self._gradient, [], _drawn()

        def leaf_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            inputs.append(value.detach().requires_grad_())
            return inputs[-1]

        args, kwargs = _pytree.tree_map(leaf_of, (self._args, self._kwargs))
        parameter, hook = target.parameter, None
        if parameter is None:
            hook = nn.Module.register_forward_hook(target.module, self._returned, prepend=True)
        try:
            with torch.enable_grad():
                output = getattr(self._module, self._method)(*args, **kwargs)
                leaves = [leaf for _, leaf in outputs_of(output) if isinstance(leaf, torch.Tensor)]
                self._check(leaves)
                outputs = [leaves[place] for place in target.given]
                gradients = list(target.given.values())
                for leaf, gradient in zip(outputs, gradients, strict=True):
                    # first, as the hook was that has kept it: those of the script come after it
                    put_first(leaf.register_hook(partial(_given_instead, gradient)))  # type: ignore[no-untyped-call]  # torch has no annotation
                if parameter is not None:
                    inputs.insert(0, parameter)
                inputs += [each for each in parameters_of(self._module) if each.requires_grad and each is not parameter]
                before = random_numbers()
                found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
                if _drawn() != drawn or not same_numbers(before, random_numbers()):
                    raise SecondRunStopped("it draws random numbers that are not known")
        finally:
            if hook is not None:
                hook.remove()
        self.made = [(each, made) for each, made in zip(inputs, found, strict=True) if made is not None]
        if parameter is not None and found[0] is not None:
            self._compare(found[0])

    def _check(self, leaves: list[torch.Tensor]) -> None:
        """Stop if this forward is another one than the first: its outputs are others."""
        rows = [row for row in self._gradient.returned if row.kind is RowKind.MEASURED]
        outputs = dict(enumerate(leaves))
        for place, gradient in self._gradient.given.items():
            leaf = outputs.get(place)
            if leaf is None or not leaf.requires_grad or (leaf.shape, leaf.dtype) != (gradient.shape, gradient.dtype):
                raise SecondRunStopped("the forward returned something else")
        numbers = {numbers_of(leaf)[0].abs_max for leaf in leaves}
        if any(row.finite and row.abs_max not in numbers for row in rows):
            raise SecondRunStopped("the forward returned other numbers")

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        role = self._gradient.row.role.removeprefix("grad ")
        leaf = next((leaf for name, leaf in outputs_of(output) if name == role), None)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(self._compare)  # type: ignore[no-untyped-call]  # likewise

    def _compare(self, gradient: torch.Tensor) -> None:
        """The first bad one in the order of the backward counts: that was the alarm."""
        origin, flags = self._watch.origin_of(gradient)
        if self._has_looked or not flags:
            return
        self._has_looked = True
        self.reached = without_modes(self._gradient.is_like, gradient, flags)
        self.operation = _operation_of(origin) if self.reached else None


def _given_instead(given: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A hook: what other uses of an output within the root have added is in the gradient that was kept."""
    return given


def _drawn() -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy, which are not those of the first run."""
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), *(each.tobytes() if hasattr(each, "tobytes") else each for each in legacy)


def _operation_of(origin: Any) -> BadOperation | None:
    return origin.operation if origin is not None else None
