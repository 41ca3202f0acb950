"""Global forward hooks: a frame for every module call of an unmodified script.

The numbers of CPU tensors are read as the hooks run; those of CUDA tensors stay on the device until the page is copied
(device_page.py). Nothing here raises into the training except the abort that the user asked for.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ..core.alarm import alarms, anomaly_of_page
from ..core.errors import OverflowDetected
from ..core.exits import ExitCode
from ..core.frames import Phase, RowKind
from ..core.pages import Names, decode_page
from ..core.recorder.layout import NOTHING, Field, RankPhase
from ..core.recorder.reader import RecorderReader
from ..core.recorder.writer import RecorderWriter, RowTuple
from ..core.records import Anomaly, Fault, ShapeDef, SlotDef, Where
from ..core.settings import WorkerSettings
from ..core.values import DTYPE_NAMES, NonFinite, name_of
from .collectives import sequence_number
from .device_page import DevicePages
from .leaves import leaves_of
from .measure import CODES, Numbers, measure
from .roots import ModuleInfo, Roots

_MAX_FAULTS = 20
_MAX_ANOMALIES = 64


HANDS_OVER_KWARGS = "with_kwargs" in inspect.signature(torch_module.register_module_forward_hook).parameters
"""Not yet in torch 2.5: there, keyword arguments are not in the frames."""

_CALL = torch.nn.Module._call_impl.__code__
"""The code of every module call: how a frame or a traceback is seen to belong to one."""


def version_of(tensor: torch.Tensor) -> int:
    """Counts the changes in place; -1 for an inference tensor, which does not count them."""
    return -1 if tensor.is_inference() else tensor._version


class Hooks:
    """The hooks of one rank. `attach()` puts them in, `detach()` takes every one of them out again."""

    def __init__(self, recorder: RecorderWriter, settings: WorkerSettings, rank: int) -> None:
        self._recorder = recorder
        self._fields = recorder.fields
        self._settings = settings
        self._rank = rank
        self._handles: list[Any] = []
        self._roots = Roots(recorder)
        self._stack: list[ModuleInfo] = []
        self._thread = 0
        self._outer_exception: BaseException | None = None
        self._step = 0
        self._batch = -1
        self._page = -1
        self._opens_batch = False
        self._first_root: int | None = None
        self._seen: dict[int, tuple[Callable[[], Any], int, RowTuple, int]] = {}
        """id of a tensor -> (weak reference, version, its row without the slot, flags), within one page."""
        self._weights: dict[int, tuple[Callable[[], Any], int, int, Numbers | torch.Tensor]] = {}
        """id of a parameter -> (weak reference, version, step, numbers, or the row on the device that holds them)."""
        self._shapes: dict[tuple[int, ...], int] = {}
        self._slots = 0
        self._anomaly: Anomaly | None = None
        self._late: Anomaly | None = None
        """An anomaly of an earlier batch, whose numbers have only now come back from the device."""
        self.device_pages: DevicePages | None = None
        self._device_failed = False
        self._anomalies = 0
        self._faults = 0

    # -- in and out ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register the global hooks. Modules that exist already, and all that are made later, are watched."""
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._before),
            self._register_after(),
            torch_optimizer.register_optimizer_step_post_hook(self._stepped),
        ]
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        os.register_at_fork(after_in_child=self._forget)

    def _register_after(self) -> Any:
        if not HANDS_OVER_KWARGS:
            return torch_module.register_module_forward_hook(self._after, always_call=True)
        return torch_module.register_module_forward_hook(self._after, with_kwargs=True, always_call=True)

    def detach(self) -> None:
        """Remove the hooks; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
            # torch (2.13 still) forgets this one of its three tables
            getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
        self._handles = []

    def _forget(self) -> None:
        """In a forked child (a DataLoader worker): the recorder belongs to the parent."""
        self.detach()

    # -- where we are -------------------------------------------------------------------------------------------

    def where(self) -> Where:
        """The place in the run, for an event."""
        root = self._stack[0].root.label if self._stack else ""
        return Where(
            rank=self._rank,
            attempt=self._settings.attempt,
            step=self._step,
            batch=self._batch,
            root=root,
            page=self._page,
            seq=sequence_number(),
            time_ns=time.time_ns(),
        )

    def raised_in(self, error: BaseException) -> str | None:
        """The innermost module that `error` came through, or None if it came from outside of all modules."""
        module = None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is _CALL:
                module = trace.tb_frame.f_locals.get("self")
            trace = trace.tb_next
        return self._roots.name_of(module) if module is not None else None

    # -- the hooks ----------------------------------------------------------------------------------------------

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        try:
            self._enter(module)
        except Exception as error:
            self._fault("forward pre-hook", error)
        if self._late is not None:
            self._raise_late()

    def _after(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        # (kwargs, output); when the forward raised, torch (2.13 still) leaves out the kwargs of a global hook
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        try:
            finished = self._leave(module, args, kwargs, output)
        except Exception as error:
            self._fault("forward hook", error)
            return
        if finished:
            self._batch_ended()
        if self._late is not None:
            self._raise_late()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._step += 1
        self._fields[Field.STEP] = self._step

    def _enter(self, module: torch.nn.Module) -> None:
        stack = self._stack
        if stack and (stack[0].ref() is module or not stack[0].root.knows(module)) and not self._still_running():
            stack.clear()  # an interrupt tore the last forward away without its hooks
        if stack:
            if threading.get_ident() != self._thread:
                return  # a second thread inside one forward: its calls cannot be put in order with ours
            info = self._roots.child(module, stack[0].root, stack[-1])
        else:
            info, self._opens_batch = self._roots.enter(module)
            self._open_page(info)
        info.entered = self._recorder.frames
        stack.append(info)
        self._fields[Field.MODULE] = info.id

    def _still_running(self) -> bool:
        """Whether the innermost call on our stack is on Python's stack too. For the rare cases that need it."""
        innermost = self._stack[-1].ref()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals.get("self") is innermost:
                return True
            frame = frame.f_back
        return False

    def _open_page(self, info: ModuleInfo) -> None:
        root = info.root
        if self._opens_batch:
            root.batches += 1
        self._batch = max(0, root.batches - 1)
        if self._first_root is None:
            self._first_root = root.id
        self._thread = threading.get_ident()
        self.look_at_arrived()
        self._outer_exception = sys.exc_info()[1]
        self._seen.clear()
        self._anomaly = None
        self._page = self._recorder.begin_page(root.id, self._batch, self._step)
        self._fields[Field.SEQ] = sequence_number()
        self._fields[Field.PHASE] = RankPhase.FORWARD

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """Record the frame; True when it was the root's."""
        stack = self._stack
        if not stack or threading.get_ident() != self._thread:
            return False
        while stack[-1].ref() is not module:
            if not any(info.ref() is module for info in stack):
                return False  # entered before the hooks were there
            stack.pop()
        info = stack[-1]
        error = sys.exc_info()[1] if output is None else None
        raised = error is not None and error is not self._outer_exception
        try:
            # A wrapper has no frame of its own, unless nothing in it could be seen: what torch.compile has compiled
            if not info.is_wrapper or info.entered == self._recorder.frames:
                self._record(info, module, args, kwargs, output, raised)
        finally:
            stack.pop()
            if not stack:
                self._recorder.end_page()
        fields = self._fields
        if stack:
            fields[Field.MODULE] = stack[-1].id
            return False
        self.look_at_arrived()
        fields[Field.MODULE] = -1
        fields[Field.PHASE] = RankPhase.SCRIPT
        fields[Field.SEQ] = sequence_number()
        if raised:
            return False
        self._last_root = info.root
        return True

    def _record(
        self, info: ModuleInfo, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        """Take the frame, seen by no mode that the script has set (a tracer, a counter of operations, a device)."""
        with torch._C.DisableTorchFunction():
            if torch._C._len_torch_dispatch_stack():
                with _disable_current_modes():
                    self._take_frame(info, module, args, kwargs, output, raised)
            else:
                self._take_frame(info, module, args, kwargs, output, raised)

    def _take_frame(
        self, info: ModuleInfo, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        rows: list[RowTuple] = []
        alarm: tuple[str, int, RowTuple] | None = None
        flags_of_weights = flags_of_inputs = 0
        weighted = False
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    row, flags = self._weight_row(info, name, parameter)
                    rows.append(row)
                    weighted = True
                    if flags:
                        flags_of_weights |= flags
                        alarm = alarm or (name, flags, row)
            for role, leaf in self._inputs(args, kwargs):
                row, flags = self._leaf_row(info, role, leaf)
                rows.append(row)
                if flags:
                    flags_of_inputs |= flags
                    if alarms(flags, is_output=False, has_weights=weighted, input_flags=flags_of_inputs):
                        alarm = alarm or (role, flags, row)
            if not raised:
                found: list[tuple[str, Any]] = []
                leaves_of(output, "output", found)
                for role, leaf in found:
                    row, flags = self._leaf_row(info, role, leaf)
                    rows.append(row)
                    if alarms(flags, is_output=True, has_weights=weighted, input_flags=flags_of_inputs):
                        alarm = alarm or (role, flags, row)
        finally:
            torch._C._set_grad_enabled(grad)
        parent = self._parent()
        seq = sequence_number()
        index = self._recorder.frame(
            info.id, parent.id if parent else NOTHING, len(self._stack) - 1, Phase.FORWARD, seq, rows
        )
        if alarm is not None and self._anomaly is None:
            self._alarm(info, index, seq, alarm, not flags_of_inputs, not flags_of_weights)

    def _parent(self) -> ModuleInfo | None:
        """The module whose code made this call: the nearest one on the stack that is not a wrapper."""
        for info in reversed(self._stack[:-1]):
            if not info.is_wrapper:
                return info
        return None

    @staticmethod
    def _inputs(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        leaves_of(args if isinstance(args, tuple) else (args,), "input", found)
        if kwargs:
            leaves_of(kwargs, "kwargs", found)
        return found

    # -- rows ---------------------------------------------------------------------------------------------------

    def _slot(self, info: ModuleInfo, role: str) -> int:
        slot = info.slots.get(role)
        if slot is None:
            slot = info.slots[role] = self._slots
            self._slots += 1
            self._recorder.append(SlotDef(slot, info.id, role), name=True)
        return slot

    def _shape(self, tensor: torch.Tensor) -> int:
        try:
            dims = tuple(tensor.shape)
        except RuntimeError:  # a nested tensor has no shape of its own
            return NOTHING
        shape = self._shapes.get(dims)
        if shape is None:
            shape = self._shapes[dims] = len(self._shapes)
            self._recorder.append(ShapeDef(shape, tuple(int(dim) for dim in dims)), name=True)
        return shape

    def _leaf_row(self, info: ModuleInfo, role: str, leaf: Any) -> tuple[RowTuple, int]:
        slot = self._slot(info, role)
        if not isinstance(leaf, torch.Tensor):
            kind = RowKind.NONE if leaf is None else RowKind.NOT_A_TENSOR
            return (slot, NOTHING, NOTHING, 0, int(kind)), 0
        version = version_of(leaf)
        known = self._seen.get(id(leaf))
        if known is not None and known[0]() is leaf and known[1] == version and version >= 0:
            return (slot, *known[2][1:]), known[3]
        row, flags = self._row(slot, leaf)
        self._seen[id(leaf)] = (weakref.ref(leaf), version, row, flags)
        return row, flags

    def _weight_row(self, info: ModuleInfo, name: str, parameter: torch.Tensor) -> tuple[RowTuple, int]:
        """Weights are read once per optimizer step; every page holds their numbers all the same."""
        slot = self._slot(info, name)
        seen = self._seen.get(id(parameter))
        version = version_of(parameter)
        if seen is not None and seen[0]() is parameter and seen[1] == version:
            return (slot, *seen[2][1:]), seen[3]
        known = self._weights.get(id(parameter))
        if known is not None and known[0]() is parameter and known[1] == version and known[2] == self._step:
            row, flags = self._row(slot, parameter, known[3])
        else:
            numbers: Numbers | torch.Tensor | None
            if self._on_device(parameter):
                row, flags = self._row(slot, parameter)
                numbers = self.device_pages.last() if self.device_pages and row[1] != NOTHING else None
            else:
                numbers = measure(parameter)
                row, flags = self._row(slot, parameter, numbers)
            if numbers is not None:
                self._weights[id(parameter)] = (weakref.ref(parameter), version, self._step, numbers)
        self._seen[id(parameter)] = (weakref.ref(parameter), version, row, flags)
        return row, flags

    @staticmethod
    def _on_device(tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    def _row(
        self, slot: int, tensor: torch.Tensor, numbers: Numbers | torch.Tensor | None = None
    ) -> tuple[RowTuple, int]:
        """A row and what is non-finite in it; of a tensor on a device that is known only later, and 0 here."""
        value, flags = NOTHING, 0
        if isinstance(numbers, torch.Tensor):
            assert self.device_pages is not None
            value, kind = self.device_pages.again(numbers), RowKind.MEASURED
        elif numbers is None and self._on_device(tensor):
            index = self._device_value(tensor)
            value = NOTHING if index is None else index
            kind = RowKind.NOT_MEASURABLE if index is None else RowKind.MEASURED
        else:
            numbers = numbers if numbers is not None else measure(tensor)
            kind = RowKind(numbers.kind)
            if kind is RowKind.MEASURED:
                value = self._recorder.value(numbers.low, numbers.high, numbers.meta)
                flags = numbers.meta & 0xFF
        return (slot, value, self._shape(tensor), CODES.get(tensor.dtype, 0), int(kind)), flags

    def _device_value(self, tensor: torch.Tensor) -> int | None:
        if self.device_pages is None:
            if tensor.device.type != "cuda" or self._device_failed:
                return None
            try:
                self.device_pages = DevicePages(self._recorder, tensor.device)
            except Exception as error:
                self._device_failed = True
                self._fault("device page", error)
                return None
        return self.device_pages.measure(tensor) if tensor.device == self.device_pages.device else None

    # -- what to do about it ------------------------------------------------------------------------------------

    def _alarm(
        self,
        info: ModuleInfo,
        frame: int,
        seq: int,
        alarm: tuple[str, int, RowTuple],
        inputs_finite: bool,
        weights_finite: bool,
    ) -> None:
        role, flags, row = alarm
        shape = next((list(dims) for dims, number in self._shapes.items() if number == row[2]), None)
        where = self.where()
        self._anomaly = Anomaly(
            where=where,
            frame=frame,
            module=info.name,
            cls=info.cls,
            phase="forward",
            role=role,
            value=name_of(NonFinite(flags)),
            dtype=DTYPE_NAMES[row[3]],
            shape=shape,
            inputs_finite=inputs_finite,
            weights_finite=weights_finite,
            aborts=self._settings.on_overflow == "abort",
        )
        self._record_anomaly(self._anomaly)

    def _record_anomaly(self, anomaly: Anomaly) -> None:
        self._anomalies += 1
        if self._anomalies <= _MAX_ANOMALIES:
            self._recorder.append(anomaly)
        else:  # training on with nan in every batch: the first ones are what the question is about
            self._fields[Field.RECORDS_LOST] += 1

    def look_at_arrived(self) -> None:
        """Check the pages whose numbers have come back from the device. Does not wait for the others."""
        if self.device_pages is None:
            return
        for number in self.device_pages.arrived():
            anomaly = self._anomaly_of(number)
            if anomaly is not None:
                self._record_anomaly(anomaly)
                self._late = self._late or anomaly

    def _anomaly_of(self, page_number: int) -> Anomaly | None:
        """Read our own recorder, as the node agent does: this happens once or twice in the life of a run."""
        reader = RecorderReader(self._recorder.path)
        try:
            names = Names()
            names.add(reader.new_entries()[0])
            message = reader.page(page_number)
        finally:
            reader.close()
        if message is None:
            return None
        page = decode_page(message, names)
        return anomaly_of_page(page, aborts=self._settings.on_overflow == "abort")

    def _raise_late(self) -> None:
        late, self._late = self._late, None
        if late is not None and late.aborts:
            self._abort(late)

    def _abort(self, anomaly: Anomaly) -> None:
        self._fields[Field.ABORT] = ExitCode.OVERFLOW
        module = f"`{anomaly.module}` ({anomaly.cls})" if anomaly.module else f"`{anomaly.cls}`"
        raise OverflowDetected(
            f"gpuwatch: rank {self._rank}: {anomaly.value} in {anomaly.role} of {module}, "
            f"{anomaly.phase} of batch {anomaly.where.batch}; the combined report follows when all ranks have "
            "ended. To go on training after an overflow: --on-overflow continue"
        )

    def _batch_ended(self) -> None:
        """The root's forward has returned. Raises what the user asked for, and nothing else."""
        anomaly = self._anomaly
        if anomaly is not None and anomaly.aborts:
            self._abort(anomaly)
        last = self._settings.abort_after_batch
        if last is not None and self._last_root.id == self._first_root and self._batch >= last:
            print(
                f"gpuwatch: rank {self._rank}: ending after batch {self._batch}: --abort-after-batch", file=sys.stderr
            )
            raise SystemExit(0)

    def _fault(self, part: str, error: Exception) -> None:
        """Our own error: recorded a few times, and the training goes on."""
        self._faults += 1
        if self._faults <= _MAX_FAULTS:
            try:
                self._recorder.append(Fault(self.where(), part, f"{type(error).__name__}: {error}"))
            except Exception:
                pass
        if self._faults == _MAX_FAULTS:
            self.detach()
