"""Runs the forward of an alarm's module once more, and finds the operation that made the bad value.

The job ends anyway, so there is time. The forward runs in a thread of its own: it can hang, and the job waits for it no
longer than a deadline. It does not run where it would issue a collective, or where its inputs have changed since.

    after `attn.proj`   its input holds nan: the alarm. The maker is code of `attn`, or of a module around that.
    after `attn`        its inputs are in hand: `attn` runs again, up to the nan that `attn.proj` is handed

The numbers of a device arrive when such a call is over. Then the root runs again, if what it was handed still lives.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from ...core.events import SECOND_RUN_S, BadOperation, CaptureFile, ForwardCaptured, SecondRun
from ...core.frames import FramePhase, RowMark
from ...core.recorder.writer import OpenPage
from ...core.roles import RoleKind
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite
from ..device.device import may_have_devices, transforms, without_modes
from ..hooks.global_hooks import GlobalHooks, RunningCalls
from ..record.collectives import issued
from ..record.frame_writer import FrameWriter
from ..record.held_alarms import NonFiniteRow
from ..record.judging import ends_by_another_watch
from ..record.names import inputs_of, unwrap, walk
from ..record.roots import ModuleInfo
from ..record.tensor_stats import version_of
from .capture import ForwardCapture
from .explained_batch import ExplainedBatch
from .forward_thread import (
    ContextMaker,
    ForwardTarget,
    ForwardThread,
    RandomNumbers,
    contexts_of_this_thread,
    function_modes,
    kept_as_it_is,
    random_numbers,
    runs_eagerly,
)
from .operation_watch import OperationWatch, numbers_of

_MOST_ROOTS = 8
_MOST_BYTES = 4 << 20
"""A larger tensor that a root was handed is not kept alive."""
_dispatch_modes = name_in_torch("torch._C._len_torch_dispatch_stack", lambda: 0)
_NOT_DISPATCHED = "no operation that torch dispatches made it"
_GONE = "the arguments of the call that made it were gone when its numbers arrived"


@dataclass(eq=False, slots=True)
class _KeptCall:
    """A call that can run again."""

    info: ModuleInfo
    page: int
    issued: bool
    """Collectives ran within it."""
    contexts: list[ContextMaker]
    leaves: list[Any] = field(default_factory=list)
    """Its arguments, where it is kept; a tensor may be a _WeakTensor."""
    tree: Any = None
    versions: list[int] = field(default_factory=list)
    random: RandomNumbers | None = None
    """Those that it got; None: unknown."""
    method: str = "forward"
    """What ran: Lightning calls `training_step` through its module's `forward`."""


class _WeakTensor(NamedTuple):
    tensor: weakref.ref[torch.Tensor]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _kept_tensor(tensor: torch.Tensor) -> torch.Tensor | _WeakTensor:
    """Without its graph: an argument that requires gradients would keep that alive."""
    if tensor.requires_grad or tensor.numel() * tensor.element_size() > _MOST_BYTES:
        return _WeakTensor(weakref.ref(tensor))
    return tensor


def _redirection(module: nn.Module) -> dict[str, Any]:
    """`{"method_name": "training_step", "original_forward": ...}` while a function of Lightning or Fabric stands in
    place of the module's `forward`, for one call; else {}."""
    forward = vars(module).get("forward")
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if forward is None or not {"method_name", "original_forward"} <= set(names):
        return {}
    return {name: cell.cell_contents for name, cell in zip(names, forward.__closure__, strict=True)}


def _strong(leaf: Any) -> Any:
    """The tensor that was kept weakly; as it was, if that is gone."""
    held = leaf.tensor() if isinstance(leaf, _WeakTensor) else None
    return leaf if held is None else held


@dataclass(eq=False, repr=False)
class SecondRuns:
    """The one second run of a rank."""

    _frames: FrameWriter
    _running: RunningCalls
    _global: GlobalHooks
    _is_compiled: Callable[[], bool]
    """Whether the rank runs compiled code."""
    explained: ExplainedBatch

    def __post_init__(self) -> None:
        self._progress, self._roots = self._frames.progress, self._frames.roots
        self.limit_s = SECOND_RUN_S
        """For all its runs together."""
        settings = self._progress.settings
        self._explains = settings.explain != "off"
        rank, tests = self._progress.rank, self._explains
        self._capture = ForwardCapture(settings.capture, settings.capture_max, rank, is_tested=tests)
        self._captures = bool(settings.capture)
        self.is_on = (self._explains or self._captures) and settings.on_overflow == "abort"
        """Until its one run."""
        self.keeps_roots = self.is_on and may_have_devices()
        """Whether it must be told of the arguments of roots."""
        self._roots_kept: dict[int, _KeptCall] = {}
        self._random: RandomNumbers | None = None
        self._method: tuple[int, str] = (0, "forward")
        """(id of the module that the root wraps, what the root's call runs of it)"""
        self._bad: NonFiniteRow | None = None
        self._why = self._found = ""

    def expect(self, bad: NonFiniteRow) -> bool:
        """An alarm ends the job. Whether the call that made the value is looked for as calls around it return."""
        if self.explained.covers(bad):
            self._bad, operation = bad, self.explained.operation_for(bad)
            self._end("" if operation is not None else _NOT_DISPATCHED, operation)
            return False
        is_of_call = bad.row.role_kind in (RoleKind.INPUT, RoleKind.OUTPUT) and not bad.row.mark & RowMark.SKIPPED
        if self.is_on and is_of_call and bad.frame.phase in (FramePhase.FORWARD, FramePhase.RECOMPUTE):
            self._bad, self._why = bad, _GONE
            if bad.frame.phase == FramePhase.RECOMPUTE:
                self._end("it was made when a checkpointed forward ran again within the backward")
        return self._bad is not None

    def returned(self, info: ModuleInfo, args: Any, kwargs: Any, output: Any) -> None:
        """A call has returned. Run it again if it can have made the value."""
        bad, page = self._bad, info.root.page
        if bad is None or page is None or page.number != bad.page.number or output is None:
            return
        if ends_by_another_watch():  # torch is within its table of hooks, which a second run would change
            self._end("another watch of the model has ended the call")
            return
        if threading.get_ident() == self._running.thread:
            begun_with = self._random if not self._running.stack else None
            call = _KeptCall(info, page.number, self._has_issued(info), contexts_of_this_thread(), random=begun_with)
            module, (root, method) = info.ref(), self._method
            if module is not None and id(unwrap(module)) == root and info not in self._running.stack:
                call.method = method  # else `training_step` has called its own module
            self._look_into(call, args, kwargs)

    def conclude(self) -> str:
        """The job ends. Where it was made, as a clause; "" if that is not known, and the record says why."""
        self.explained.ends()
        bad = self._bad
        kept = self._roots_kept.get(bad.page.root) if bad is not None else None
        if bad is not None and kept is not None and kept.page == bad.page.number:
            leaves = [_strong(leaf) for leaf in kept.leaves]
            gone = any(isinstance(leaf, _WeakTensor) for leaf in leaves)
            if self._progress.step != bad.page.step:
                self._why = "an optimizer step has changed the weights since"
            elif not gone and [version_of(leaf) for leaf in leaves if _is_tensor(leaf)] != kept.versions:
                self._why = "what the model was handed was changed in place since"
            elif not gone:
                self._look_into(kept, *_pytree.tree_unflatten(leaves, kept.tree))
        if self._bad is not None:
            self._end(self._why)
        return self._found

    def batch_begins(self, module: nn.Module, page: OpenPage) -> None:
        """A root's batch begins: with --explain N, its operations are watched if it is that one."""
        if page.batch == self.explained.batch:
            self.explained.begins(module, page.number)

    def batch_ends(self, page: int) -> None:
        """A root begins its next batch after the one of this page."""
        self.explained.batch_ends(page)

    # -- the call of a root, whose numbers arrive later from a device -------------------------------------------

    def root_begins(self, module: nn.Module) -> None:
        """A root is called: note the random numbers that it gets, and what runs."""
        self._random, run = without_modes(random_numbers), unwrap(module)
        self._method = id(run), _redirection(run).get("method_name", "forward")

    def root_returned(self, info: ModuleInfo, args: Any, kwargs: Any) -> None:
        """Keep the call of a root until its next one: small tensors that it was handed, and others only weakly."""
        if info.root.page is not None and info.root.id < _MOST_ROOTS:
            leaves, tree = _pytree.tree_flatten((args, kwargs))
            versions = [version_of(leaf) for leaf in leaves if _is_tensor(leaf)]
            leaves = [_kept_tensor(leaf) if _is_tensor(leaf) else leaf for leaf in leaves]
            ran, contexts = self._has_issued(info), contexts_of_this_thread()
            kept = _KeptCall(info, info.root.page.number, ran, contexts, leaves, tree, versions, self._random)
            kept.method = self._method[1]
            self._roots_kept[info.root.id] = kept

    def _has_issued(self, info: ModuleInfo) -> bool:
        """Whether collectives ran in a call that has just returned: in that of the module that a wrapper wraps."""
        module = info.ref()
        inner = info.root.modules.get(id(unwrap(module)), info) if module is not None else info
        return issued() > inner.seq

    # -- one call -----------------------------------------------------------------------------------------------

    def _look_into(self, call: _KeptCall, args: Any, kwargs: Any) -> None:
        bad, module = self._bad, call.info.ref()
        if bad is None or module is None:
            return
        named = self._roots.find(bad.page.root, bad.frame.module, bad.frame.cls)[1]
        target, run = unwrap(named) if named is not None else None, unwrap(module)
        if target is None or not any(part is target for part in run.modules()):
            return
        if run is target and bad.row.role_kind is not RoleKind.OUTPUT and call.method == "forward":
            return
        if call.method != "forward" and not getattr(run, "automatic_optimization", True):
            self._end(f"`{call.method}` runs backward and optimizer itself, and so does not run again")
            return
        if call.issued:
            self._end("collectives ran within the call; with --sync a part of it without collectives may run again")
            return
        tensors = [leaf for _, leaf in inputs_of(args, kwargs) if isinstance(leaf, torch.Tensor)]
        if any(flags & ~NonFinite.NEGINF for _, flags in (without_modes(numbers_of, leaf) for leaf in tensors)):
            self._why = "the arguments of its call were not finite when that returned"
            return  # a call around it may have made it
        if transforms() is not None:
            self._end("a transform of torch.func was on, such as vmap")
            return
        if _dispatch_modes() or any(type(mode).__name__ != "DeviceContext" for mode in function_modes()):
            self._end("the script has a mode of torch on")
            return
        eager = runs_eagerly()
        if eager is None or not self._explains:
            self._write(call, run, args, kwargs)
            self._end("compiled code ran, and this torch cannot run it eagerly")
            return
        self._run(call, run, ForwardTarget(target, bad.row), args, kwargs, tensors, eager)

    def _run(
        self,
        call: _KeptCall,
        run: nn.Module,
        target: ForwardTarget,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        eager: ContextMaker,
    ) -> None:
        name = call.info.name
        names = {id(part): ".".join(filter(None, (name, inner))) for inner, part in walk(run)}
        watch = OperationWatch(name, names, sys._getframe(1))
        forward = ForwardThread(run, call.method, target, args, kwargs, watch)
        began = time.monotonic()
        with self._global.paused(), kept_as_it_is(run, watch, call.random):
            if (own := _redirection(run).get("original_forward")) is not None:  # the job ends in its next call
                vars(run)["forward"] = own
            forward.run(self.limit_s, [*call.contexts, eager])
        self.limit_s = max(0.0, self.limit_s - (time.monotonic() - began))
        why = forward.why
        if watch.changed or watch.has_changed(tensors):
            why = why or "its call changes an input or a buffer in place"
        elif not why or forward.lacked_memory:
            self._write(call, run, args, kwargs)
        if not why and not forward.reached:
            why = "a second run of the forward did not make it again"
        if not why and forward.operation is None:
            self._why = f"{_NOT_DISPATCHED} in a call that could run again"
            return
        self._end(why, None if why else forward.operation, eagerly=self._is_compiled())

    def _write(self, call: _KeptCall, run: nn.Module, *inputs: Any) -> None:
        """Write the call to a file, with --capture."""
        if self._captures and call.method != "forward":
            self._capture.result = CaptureFile(refused=f"`{call.method}` ran, and a capture is of a forward")
        elif self._captures:
            took_s = self._capture.write(run, call.info.name, inputs, call.contexts, call.random, self.limit_s)
            self.limit_s = max(0.0, self.limit_s - took_s)

    def _end(self, why: str = "", operation: BadOperation | None = None, eagerly: bool = False) -> None:
        bad, self._bad, self.is_on = self._bad, None, False
        assert bad is not None
        where = self._progress.where_of(bad.page, bad.frame)
        if self._explains:
            self._progress.recorder.append(SecondRun(where, operation, why, eagerly))
        if self._captures:
            file = self._capture.result or CaptureFile(refused=why or "the batch ran under --explain")
            self._progress.recorder.append(ForwardCaptured(where, file))
        if operation is not None:
            at = f" at {operation.file}:{operation.line}" if operation.file else ""
            self._found = f"{operation.op} made it{at}{f': {operation.code}' if operation.code else ''}"
