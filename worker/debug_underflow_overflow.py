"""`gpuwatch.DebugUnderflowOverflow`: the class of the same name in transformers, without its blind spots.

It has the same arguments, texts, exceptions and numbers. In addition, it reads keyword inputs, nested values, any kind
of tensor and modules that are added later, and it can be removed. It reads each tensor once per forward, in one pass
instead of five.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import torch

from ..core.frames import HEADER, NAME_INDENT, Row, format_row
from ..core.signal_errors import from_outside, suppress_own
from ..core.values import NonFinite, Value
from .detect_overflow import look, never_compiled, print_non_finite
from .device.device import without_modes
from .record.names import leaves_of
from .record.plain_tensor import unwrapped
from .record.tensor_stats import TensorStats

_NOT_IN_THE_MODEL = "(not in the model)"
_NEGINF = int(NonFinite.NEGINF)


class DebugUnderflowOverflow:
    """Prints the last frames and raises a `ValueError` at the first inf or nan in a weight, an input or an output.

    debug = DebugUnderflowOverflow(model)

    Detected inf/nan during batch_number=0
    Last 2 forward frames:
    abs min  abs max  metadata
                      encoder.block.2.layer.1.DenseReluDense T5DenseGatedGeluDense
    1.79e-06 4.65e+00 input[0]
    3.18e-04 6.27e+04 output
                      encoder.block.2.layer.1.dropout Dropout
    3.18e-04 6.27e+04 input[0]
    0.00e+00      inf output

    With `trace_batch_nums=[1, 3]` all frames of these batches (the first is 0) are printed instead, and inf and nan
    in them do not raise. With `abort_after_batch_num=3` a `ValueError` ends the training when batch 3 has finished.

    It waits for the device at every tensor and breaks the graphs of `torch.compile`. `remove()` or the end of a `with`
    block removes it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Container[int] | None = (),
        abort_after_batch_num: int | None = None,
    ) -> None:
        self.model = model
        self.trace_batch_nums: Container[int] = () if trace_batch_nums is None else trace_batch_nums
        self.abort_after_batch_num = abort_after_batch_num
        self.frames: deque[str] = deque(maxlen=max_frames_to_save)
        self.batch_number = 0
        self.detected_overflow = False
        self._heading = _heading_of_batch(0)
        self._names: dict[int, str] = {}
        self._in_forward = False
        self._seen: dict[int, tuple[Callable[[], Any], int, str, int]] = {}
        """id of a tensor -> (weak reference, version, its numbers as text, flags), within one forward of the model."""
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before)]
        self._find_modules()

    # -- attach and remove --------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove all hooks from the model. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._seen.clear()

    def __enter__(self) -> DebugUnderflowOverflow:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """A model is copied and pickled together with its hooks. Weak references cannot be."""
        return {**self.__dict__, "_seen": {}, "_names": {}}

    def _find_modules(self) -> None:
        """Update the names of all modules, and hook the modules that were added since the last call."""
        self._names = {}
        for name, module in self.model.named_modules():
            self._names[id(module)] = name
            if self._after in module._forward_hooks.values():
                continue
            with suppress_own(RuntimeError):  # a scripted module accepts no such hook
                self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))

    # -- the hooks ----------------------------------------------------------------------------------------------

    @never_compiled
    def _before(self, module: torch.nn.Module, args: Any) -> None:
        """The model's own forward begins."""
        self._find_modules()
        self._seen.clear()
        self._in_forward = True

    @never_compiled
    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return  # under export tensors have no numbers
        traces = self.batch_number in self.trace_batch_nums
        ends_batch = module is self.model
        if ends_batch:  # before the root's frame is made, as in transformers: that frame belongs to the next batch
            self.batch_number += 1
        frame = "\n".join([*self._heading, *without_modes(self._lines, module, args, kwargs, output)])
        self._heading = []
        if ends_batch:
            self._heading = _heading_of_batch(self.batch_number)
            self._in_forward = False
            self._seen.clear()
        if traces:
            self.frames.clear()
            print(frame)
        else:
            self.frames.append(frame)
            if self.detected_overflow:
                self._abort()
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise ValueError(
                f"DebugUnderflowOverflow: aborting after {self.batch_number} batches due to"
                f" `abort_after_batch_num={self.abort_after_batch_num}` arg"
            )

    def _abort(self) -> None:
        print(f"\nDetected inf/nan during batch_number={self.batch_number}")
        print(f"Last {len(self.frames)} forward frames:")
        print("\n".join([HEADER, *self.frames]))
        print("\n\n")
        self.frames.clear()
        raise ValueError(
            "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further. "
            "Please scroll up above this traceback to see the activation values prior to this event."
        )

    # -- one frame ----------------------------------------------------------------------------------------------

    def _lines(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> list[str]:
        """Name and class, then one line per tensor: the module's own weights, inputs, keyword inputs, outputs."""
        if not self._in_forward:  # a part of the model is called by itself: no forward bounds how old the numbers are
            self._seen.clear()
        if id(module) not in self._names:
            self._find_modules()
        lines = [f"{NAME_INDENT} {self._names.get(id(module), _NOT_IN_THE_MODEL)} {type(module).__name__}"]
        for name, parameter in module.named_parameters(recurse=False):
            lines.append(self._line(name, parameter))
        for position, value in enumerate(args if isinstance(args, tuple) else (args,)):
            is_plain = isinstance(value, torch.Tensor)
            for role, leaf in _open(value, f"input[{position}]"):
                lines.append(self._line(role, leaf, may_mask=not is_plain))
        for name, value in kwargs.items():
            for role, leaf in _open(value, f"kwargs.{name}"):
                lines.append(self._line(role, leaf, may_mask=True))
        for role, leaf in _open_output(output):
            lines.append(self._line(role, leaf))
        return lines

    def _line(self, role: str, leaf: Any, *, may_mask: bool = False) -> str:
        """One line of a frame. `may_mask`: -inf alone is expected, as in inputs that transformers' class ignores."""
        if not isinstance(leaf, torch.Tensor):
            return f"{'None' if leaf is None else 'not a tensor':>17} {role}"
        numbers, flags = self._numbers(leaf)
        if flags and not (may_mask and flags == _NEGINF):
            print_non_finite(flags, role)
            self.detected_overflow = True
        return numbers + role

    def _numbers(self, tensor: torch.Tensor) -> tuple[str, int]:
        """The text of a line before the role, and the tensor's flags."""
        version = _version_of(tensor)
        known = self._seen.get(id(tensor))
        if known is not None and known[1] == version and known[0]() is tensor:
            return known[2], known[3]
        numbers = look(tensor)
        text, flags = _text(numbers), numbers.meta & 0xFF
        if version is not None:
            self._seen[id(tensor)] = (weakref.ref(tensor), version, text, flags)
        return text, flags


def _heading_of_batch(number: int) -> list[str]:
    return [f"\n\n{NAME_INDENT} *** Starting batch number={number} ***", HEADER]


def _open(value: Any, role: str) -> list[tuple[str, Any]]:
    """(role, leaf) of every leaf of `value`. A value that cannot be flattened or is empty is a leaf itself."""
    if isinstance(value, torch.Tensor) or value is None:
        return [(role, value)]
    found: list[tuple[str, Any]] = []
    with suppress_own(Exception):  # a user's container whose access raises
        leaves_of(value, role, found)
    return found or [(role, ...)]


def _open_output(output: Any) -> list[tuple[str, Any]]:
    """As `_open`, but roles in two levels of tuples, also named ones, are positions, as in transformers."""
    if not isinstance(output, tuple):
        return _open(output, "output")
    found: list[tuple[str, Any]] = []
    for position, value in enumerate(output):
        role = f"output[{position}]"
        if isinstance(value, tuple):
            for inner, item in enumerate(value):
                found += _open(item, f"{role}[{inner}]")
        else:
            found += _open(value, role)
    return found


def _version_of(tensor: torch.Tensor) -> int | None:
    """The number of in-place changes; None if they are not counted."""
    try:
        return None if tensor.is_inference() else unwrapped(tensor)._version
    except Exception as error:  # a tensor class without a version
        if from_outside(error):
            raise
        return None


def _text(numbers: TensorStats) -> str:
    """A line of the table up to its role.

    >>> _text(TensorStats(1, 3, 0, 0))
    '1.00e+00 3.00e+00 '
    """
    value = Value(*numbers[:3])
    nan, posinf, neginf = (kind in value.flags for kind in (NonFinite.NAN, NonFinite.POSINF, NonFinite.NEGINF))
    return format_row(Row("", value.abs_min, value.abs_max, nan, posinf, neginf, "", None, numbers.content))
