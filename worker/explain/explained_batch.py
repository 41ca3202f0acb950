"""--explain N: one batch in which every operation is watched, from its forward to its step.

An operation of a backward has the line of the forward whose backward it is. Each operation waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from ...core.events.alarm_evidence import BadOperation
from ...core.frames import FramePhase
from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from ..hooks.accumulated_gradients import gradient_of, put_first
from ..record.autograd_graph import GraphCalls
from ..record.bad_elements import KeptSummands
from ..record.collectives import ranks
from ..record.frame_writer import FrameWriter
from ..record.held_alarms import NonFiniteRow
from ..record.names import parameters_of, walk
from .backward_watch import BackwardWatch, running_node
from .operands import operation_name
from .operation_watch import MadeValue, foreign_class

_current_mode = name_in_torch("torch.utils._python_dispatch._get_current_dispatch_mode", lambda: None)
_modes = name_in_torch("torch._C._len_torch_dispatch_stack", lambda: 0)
_MOST_MADE = 4096
_SUMS_IN_PLACE = ("allreduce_", "allreduce_coalesced_", "reduce_")


class _MadeTensor(NamedTuple):
    shape: list[int]
    made: MadeValue
    of_backward: bool


class BatchWatch(BackwardWatch):  # type: ignore[no-untyped-call]  # torch has no annotation there
    """Watches operations of the training itself: it stops none, copies nothing, and leaves collectives alone."""

    def __init__(self, names: dict[int, str], module_of: Callable[[int], str | None], summands: KeptSummands) -> None:
        """`names`: id of a module -> its name. `module_of`: number of an autograd node -> the module that made it."""
        super().__init__("", names, None, module_of)
        self._summands = summands
        self.made: list[_MadeTensor] = []
        self.error: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.stopped:
            return func(*args, **kwargs)
        if foreign_class(types) is not None:
            return NotImplemented  # its class is asked, and calls operations on plain tensors
        handed = None
        if "c10d" in func.namespace:
            self._guarded(self._changes, func, args)
        else:
            handed = self._guarded(self._handed_to, func, args, kwargs)
        result = func(*args, **kwargs)
        if handed is not None:
            self._guarded(self._look_at, func, args, kwargs, handed, result)
        return result

    def add_names(self, names: dict[int, str]) -> None:
        """Another root is called in the batch."""
        self._names.update(names)

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # the script's operation goes on
            if from_outside(error):
                raise
            self.error, self.stopped = error, "an error"
            return None

    def _changes(self, func: Any, args: Any) -> None:
        """A collective writes into tensors: what they hold must be read. A sum writes over what goes into it."""
        is_sum = operation_name(func) in _SUMS_IN_PLACE
        for leaf in _pytree.tree_leaves(args):
            record = self._record(leaf) if isinstance(leaf, torch.Tensor) else None
            if record is not None:
                record.unknown = True
                if is_sum:
                    self._summands.keep(leaf, leaf)

    def _keep(self, tensor: torch.Tensor, name: str) -> None:
        """The training changes what it changes."""

    def _has_made(self, tensor: torch.Tensor, made: MadeValue) -> None:
        super()._has_made(tensor, made)
        if len(self.made) < _MOST_MADE:
            self.made.append(_MadeTensor(list(tensor.shape), made, running_node() is not None))


@dataclass(eq=False, repr=False)
class ExplainedBatch:
    """The batch of `--explain N` of one rank."""

    _frames: FrameWriter
    _calls_of: Callable[[int], list[GraphCalls]]
    """Number of a page -> the calls whose graphs its backward goes through."""
    _summands: KeptSummands

    def __post_init__(self) -> None:
        progress = self._frames.progress
        wanted, rank = progress.settings.explain, progress.settings.rank
        self._fault, self._guard = progress.faults.record, progress.faults.within("a second run")
        self.batch = wanted if isinstance(wanted, int) and rank in (None, progress.rank) else -1
        """-1: none."""
        self._thread = -1
        self._pages: set[int] = set()
        """Numbers of its pages: several roots may have one."""
        self._watch: BatchWatch | None = None
        self._made: list[_MadeTensor] = []
        """Kept: the numbers of a device arrive when the batch is over."""
        self._notes_lines = False
        """Anomaly mode is ours."""
        self._handles: dict[int, Any] = {}
        """By id of a parameter."""

    def begins(self, module: nn.Module, page: int) -> None:
        """The batch of a root begins. Called where the script's modes are on.

        torch removes the mode that is on top. So a mode of the script's that is on now would later remove ours instead.
        """
        names = {id(part): name for name, part in walk(module)}
        self._pages.add(page)
        with self._guard:
            self._keep_gradients(module)
        if self._watch is not None:
            self._watch.add_names(names)
        elif not _modes():
            self._thread = threading.get_ident()
            self._watch = BatchWatch(names, self._module_of, self._summands)
            self._made = self._watch.made
            self._notes_lines = not torch.is_anomaly_enabled()
            if self._notes_lines:
                torch.autograd.set_detect_anomaly(True, check_nan=False)
            self._watch.__enter__()  # type: ignore[no-untyped-call]  # likewise

    def _keep_gradients(self, module: nn.Module) -> None:
        """Keep this rank's own gradients. DDP, and hooks of other libraries, write over them after these hooks."""
        self._summands.is_on = ranks() > 1
        for parameter in parameters_of(module) if self._summands.is_on else ():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._keep)  # type: ignore[no-untyped-call]  # likewise
                put_first(handle)
                self._handles[id(parameter)] = handle

    def _keep(self, parameter: torch.Tensor) -> None:
        with self._guard:
            gradient = gradient_of(parameter)
            if gradient is not None:
                self._summands.keep(parameter, gradient)

    def covers(self, bad: NonFiniteRow) -> bool:
        """Whether an alarm is of this batch."""
        return bad.page.number in self._pages

    def operation_for(self, bad: NonFiniteRow) -> BadOperation | None:
        """The operation that made the value of a row; None if that is not known.

        An alarm of a backward in host memory is raised at once: the last tensor of its shape is the row's.
        """
        of_backward = bad.frame.phase in (FramePhase.BACKWARD, FramePhase.COLLECTIVE, FramePhase.RECOMPUTE)
        alike = [
            made
            for shape, made, in_backward in self._made
            if in_backward is of_backward
            and made.flags & bad.row.flags
            and (bad.row.shape is None or shape == list(bad.row.shape))
        ]
        if not alike:
            return None
        late = self._frames.rows.device_buffer is not None
        origin = (alike[0] if late or not of_backward else alike[-1]).origin
        return origin.operation if origin is not None else None

    def batch_ends(self, page: int) -> None:
        """A root begins its next batch after the one of this page."""
        if page in self._pages or (self._watch is not None and self._watch.stopped):
            self.ends()

    def ends(self) -> None:
        """It is over, or the job is."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._summands.forget()
        watch = self._watch
        if watch is None:
            return
        if watch.error is not None:
            self._fault("a second run", watch.error)
            watch.error = None
        watch.stopped = "over"
        if self._notes_lines and not torch.is_anomaly_check_nan_enabled():
            torch.autograd.set_detect_anomaly(False)
        self._notes_lines = False
        if threading.get_ident() == self._thread and _current_mode() is watch:  # else it stays, and does nothing
            watch.__exit__(None, None, None)
            watch.forget()
            self._watch = None

    def _module_of(self, number: int) -> str | None:
        found = (calls.innermost(number) for page in self._pages for calls in self._calls_of(page))
        return next((call.info.name for call in found if call is not None), None)
