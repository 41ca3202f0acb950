"""Runs the forward of an alarm's module once more, and finds the operation that made the bad value.

The job ends anyway, so there is time. The forward runs in a thread of its own: it can hang, and the job waits for it no
longer than a deadline. It does not run where it would issue a collective, or where its inputs have changed since.

    after `attn.proj`   its input holds nan: the alarm. The maker is code of `attn`, or of a module around that.
    after `attn`        its inputs are in hand: `attn` runs again, up to the nan that `attn.proj` is handed
"""

from __future__ import annotations

import contextvars
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.events import BadOperation, SecondRun
from ...core.frames import FramePhase, RowMark
from ...core.roles import RoleKind
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite
from ..record.collectives import issued
from ..record.held_alarms import NonFiniteRow
from ..record.judging import FrameWriter
from ..record.names import inputs_of, outputs_of, unwrap, walk
from ..record.roots import ModuleInfo
from ..stats.device import without_modes
from .global_hooks import GlobalHooks, RunningCalls
from .operation_watch import OperationWatch, SecondRunStopped, numbers_of

LIMIT_S = 20.0
_set_stance: Any = getattr(torch.compiler, "set_stance", None)
"""Since torch 2.6."""
_function_modes = name_in_torch("torch.overrides._get_current_function_mode_stack", list)
_dispatch_modes = name_in_torch("torch._C._len_torch_dispatch_stack", lambda: 0)
_GONE = "the arguments of the call that made it were gone when its numbers arrived"


@dataclass(eq=False, repr=False)
class SecondRuns:
    """The one second run of a rank."""

    _frames: FrameWriter
    _running: RunningCalls
    _global: GlobalHooks
    _is_compiled: Callable[[], bool]
    """Whether the rank runs compiled code."""

    def __post_init__(self) -> None:
        self._progress, self._roots = self._frames.progress, self._frames.roots
        self.limit_s = LIMIT_S
        self._bad: NonFiniteRow | None = None
        self._why = ""
        self._found = ""

    def expect(self, bad: NonFiniteRow) -> None:
        """An alarm ends the job. The call that made the value is looked for as calls around it return."""
        is_of_call = bad.row.role_kind in (RoleKind.INPUT, RoleKind.OUTPUT) and not bad.row.mark & RowMark.SKIPPED
        if is_of_call and bad.frame.phase in (FramePhase.FORWARD, FramePhase.RECOMPUTE):
            self._bad, self._why = bad, _GONE
            if bad.frame.phase == FramePhase.RECOMPUTE:
                self._end("it was made when a checkpointed forward ran again within the backward")

    def returned(self, info: ModuleInfo, args: Any, kwargs: Any, output: Any) -> None:
        """A call has returned. Run it again if it can have made the value."""
        bad, page, module = self._bad, info.root.page, info.ref()
        if bad is None or module is None or page is None or page.number != bad.page.number:
            return
        if threading.get_ident() != self._running.thread:
            return
        named = self._roots.find(bad.page.root, bad.frame.module, bad.frame.cls)[1]
        target = unwrap(named) if named is not None else None
        run = unwrap(module)
        if target is None or not any(part is target for part in run.modules()):
            return
        is_output = bad.row.role.startswith("output")
        if output is None or (run is target and not is_output):
            return
        if issued() > info.seq:
            self._end("collectives ran within its call")
            return
        tensors = [leaf for _, leaf in inputs_of(args, kwargs) if isinstance(leaf, torch.Tensor)]
        if any(flags & ~NonFinite.NEGINF for _, flags in (without_modes(numbers_of, leaf) for leaf in tensors)):
            self._why = "the arguments of its call were not finite when that returned"
            return  # a call around it may have made it
        if _dispatch_modes() or any(type(mode).__name__ != "DeviceContext" for mode in _function_modes()):
            self._end("the script has a mode of torch on")
            return
        self._run(info, run, target, args, kwargs, tensors)

    def conclude(self) -> str:
        """The job ends. Where it was made, as a clause; "" if that is not known, and the record says why."""
        if self._bad is not None:
            self._end(self._why)
        return self._found

    def _end(self, why: str = "", operation: BadOperation | None = None, **fields: Any) -> None:
        bad, self._bad = self._bad, None
        assert bad is not None
        where = self._progress.where_of(bad.page, bad.frame)
        self._progress.recorder.append(SecondRun(where, bad.frame.index, operation, why, **fields))
        if operation is not None:
            self._found = f"{operation.op} made it at {operation.file}:{operation.line}: {operation.code}"

    def _run(
        self, info: ModuleInfo, run: nn.Module, target: nn.Module, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> None:
        bad = self._bad
        assert bad is not None
        eagerly = self._is_compiled()
        if eagerly and _set_stance is None:
            self._end("compiled code ran, and this torch cannot run it eagerly")
            return
        names = {id(part): ".".join(filter(None, (info.name, name))) for name, part in walk(run)}
        watch = OperationWatch(info.name, names, sys._getframe(1))
        call = _ForwardCall(run, target, bad.row.role, args, kwargs, watch)
        began = time.monotonic()
        with self._global.paused(), _kept(run, watch):
            call.run(self.limit_s, eagerly=eagerly)
        why = call.why
        if not why and (watch.changed or watch.has_changed(tensors)):
            why = "its call changes an input or a buffer in place"
        if not why and not call.reached:
            why = "a second run of the forward did not make it again"
        if not why and call.operation is None:
            self._why = "no operation that torch dispatches made it in a call that could run again"
            return
        operation = None if why else call.operation
        self._end(why, operation, eagerly=eagerly, seconds=round(time.monotonic() - began, 3))


class _ForwardCall:
    """One forward in a thread. `reached`: the bad value came where it was seen before."""

    def __init__(
        self, module: nn.Module, target: nn.Module, role: str, args: Any, kwargs: Any, watch: OperationWatch
    ) -> None:
        self._module, self._target, self._role = module, target, role
        self._args, self._kwargs, self._watch = args, kwargs, watch
        self.reached, self.why = False, ""
        self.operation: BadOperation | None = None

    def run(self, limit_s: float, *, eagerly: bool) -> None:
        """Run it, and wait for it at most this long."""
        state = _thread_state(eagerly=eagerly)
        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._forward, state), name="gpuwatch second run", daemon=True
        )
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            self._watch.stopped = self.why = f"a second run of the forward took longer than {limit_s:g} s"

    def _forward(self, state: list[Callable[[], AbstractContextManager[Any]]]) -> None:
        why, handles = "", []
        try:
            is_output = self._role.startswith("output")
            if not is_output:
                handles.append(self._target.register_forward_pre_hook(self._handed, with_kwargs=True))
            elif self._target is not self._module:
                handles.append(self._target.register_forward_hook(self._returned, prepend=True))
            with ExitStack() as stack:
                for make in state:
                    stack.enter_context(make())
                stack.enter_context(self._watch)
                output = self._module.forward(*self._args, **self._kwargs)
                if is_output and self._target is self._module:
                    self._look(outputs_of(output))
        except SecondRunStopped as stopped:
            why = f"a second run of the forward was stopped: {stopped}"
        except BaseException as error:  # SystemExit, too: the script's code runs here
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
            what = "ran out of memory" if is_memory else f"raised {type(error).__name__}"
            why = f"a second run of the forward {what}"
        finally:
            for handle in handles:
                handle.remove()
        self.why = self.why or why

    def _handed(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._look(inputs_of(args, kwargs))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._look(outputs_of(output))

    def _look(self, leaves: list[tuple[str, Any]]) -> None:
        leaf = next((leaf for role, leaf in leaves if role == self._role), None)
        if self.reached or not isinstance(leaf, torch.Tensor):
            return
        origin, flags = self._watch.origin_of(leaf)
        self.reached = bool(flags)
        self.operation = origin.operation if origin is not None else None


def _thread_state(*, eagerly: bool) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Contexts that give another thread what torch keeps for this one. They are made and entered there."""
    found: list[Callable[[], AbstractContextManager[Any]]] = []
    found.append(torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no annotation there
        found.append(partial(torch.cuda.device, torch.cuda.current_device()))
        found.append(partial(torch.cuda.stream, torch.cuda.current_stream()))
    found += [partial(torch.device, mode.device) for mode in _function_modes()]
    for device in {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}:
        if torch.is_autocast_enabled(device):
            found.append(partial(torch.autocast, device, torch.get_autocast_dtype(device)))
    if eagerly:
        found.append(partial(_set_stance, "force_eager"))
    return found


@contextmanager
def _kept(module: nn.Module, watch: OperationWatch) -> Iterator[None]:
    """Afterwards everything is as before: random numbers, attributes and buffers of the module and those in it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # likewise
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    holders = [table for part in module.modules() for table in (vars(part), part._buffers, part._modules)]
    tables = [(table, dict(table)) for table in holders]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.mha.set_fastpath_enabled(fastpath and not torch.is_grad_enabled())
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            without_modes(watch.restore)
            for table, before in tables:
                for key in table.keys() - before.keys():
                    del table[key]
                table.update(before)
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
