"""Runs the forward of an alarm's module once more, and finds the operation that made the bad value.

The job ends anyway, so there is time. The forward runs in a thread of its own: it can hang, and the job waits for it no
longer than a deadline. It does not run where it would issue a collective, or where its inputs have changed since.

    after `attn.proj`   its input holds nan: the alarm. The maker is code of `attn`, or of a module around that.
    after `attn`        its inputs are in hand: `attn` runs again, up to the nan that `attn.proj` is handed

The numbers of a device arrive when such a call is over. Then the root runs again, if what it was handed still lives. So
it does for an alarm in a backward (second_backward.py), as that backward ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree

from ...core.events.alarm_evidence import BadOperation, CaptureFile, ForwardCaptured, PossibleLine, SecondRun
from ...core.frames import FramePhase
from ...core.marked_line import CODE_WIDTH, shown_line
from ...core.recorder.writer import OpenPage
from ...core.roles import RoleKind
from ...core.signal_errors import suppress_own
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite
from ..device.device import has_modes, has_transforms, may_have_devices, without_modes
from ..hooks.global_hooks import GlobalHooks, RunningCalls
from ..record.autograd_graph import ReturnedOutputs
from ..record.collectives import issued
from ..record.frame_writer import FrameWriter
from ..record.held_alarms import NonFiniteRow
from ..record.names import inputs_of, parts_of, unwrap
from ..record.plain_tensor import version_of
from ..record.raised_overflow import ends_by_another_watch
from ..record.roots import ModuleInfo
from .call_rerun import NOT_DISPATCHED, CallRerun
from .code_place import call_site
from .explained_batch import ExplainedBatch
from .forward_thread import (
    ForwardTarget,
    RandomNumbers,
    contexts_of_this_thread,
    function_modes,
    random_numbers,
    runs_eagerly,
)
from .kept_call import (
    KeptCall,
    is_kept_weakly,
    is_tensor,
    kept_object,
    kept_tensor,
    redirection,
    still_there,
)
from .kept_loss import KeptLoss, kept_loss
from .loss_look import LossLook
from .operands import numbers_of
from .second_backward import SecondBackward
from .spent_time import SpentTime

_MOST_ROOTS = 8
_ONLY_TENSORS = {torch.Tensor}
_dispatch_modes = name_in_torch("torch._C._len_torch_dispatch_stack", lambda: 0)
_GONE = "the arguments of the call that made it were gone when its numbers arrived"
_INPUTS_GONE = "what the model was handed was gone by then"
_ONLY_COMPILED = "code may have been compiled, which this torch cannot run eagerly"


@dataclass(eq=False, repr=False)
class SecondRuns:
    """The one second run of a rank."""

    _frames: FrameWriter
    _running: RunningCalls
    _global: GlobalHooks
    _is_compiled: Callable[[], bool]
    """Whether the rank runs compiled code."""
    explained: ExplainedBatch
    _backward: SecondBackward
    _losses: LossLook

    def __post_init__(self) -> None:
        self._progress, self._roots = self._frames.progress, self._frames.roots
        self.rerun = CallRerun(self._progress, self._global.without_ours)
        settings = self._progress.settings
        self._explains = settings.explain != "off"
        self._captures = bool(settings.capture)
        self.is_on = (self._explains or self._captures) and settings.on_overflow == "abort"
        """Until its one run."""
        self._of_backwards = self._explains and self.is_on and "grads" in settings.watch
        self._backward.given.is_on = self._of_backwards
        self._is_late = may_have_devices()
        """The numbers of a forward may arrive when its call is over."""
        self.keeps_roots = self.is_on and (self._is_late or self._of_backwards)
        """Whether it must be told of the arguments of roots."""
        self._roots_kept: dict[int, KeptCall] = {}
        self._random: RandomNumbers | None = None
        self._method: tuple[int, str] = (0, "forward")
        """(id of the module that the root wraps, what the root's call runs of it)"""
        self._bad: NonFiniteRow | None = None
        self._why = self._found = ""
        self._spent = SpentTime()

    def expect(self, bad: NonFiniteRow) -> bool:
        """An alarm ends the job. Whether the call that made the value is looked for as calls around it return."""
        if self.explained.covers(bad):
            self._bad, operation = bad, self.explained.operation_for(bad)
            if bad.frame.phase == FramePhase.LOSS:
                operation = _placed(self._losses.operation_of(bad), operation)
            self._end("" if operation is not None else NOT_DISPATCHED, operation)
            return False
        if self.is_on and self._explains and bad.frame.phase == FramePhase.LOSS:
            made = self._losses.operation_of(bad)
            if made is not None:
                self._bad = bad
                self._end("", made)
            return False
        is_of_call = bad.row.role_kind in (RoleKind.INPUT, RoleKind.OUTPUT)
        if self.is_on and is_of_call and bad.frame.phase in (FramePhase.FORWARD, FramePhase.RECOMPUTE):
            self._bad, self._why = bad, _GONE
            if bad.frame.phase == FramePhase.RECOMPUTE:
                self._end("it was made when a checkpointed forward ran again within the backward")
        elif self.is_on and self._of_backwards and self._backward.expects(bad):
            self._bad = bad
        return self._bad is not None

    def loss_is_bad(self, loss: torch.Tensor, is_scaled: bool) -> None:
        """A backward begins from a loss that is not finite: look for its operation while its operands are there.

        `is_scaled`: by a GradScaler.
        """
        if self.is_on and self._explains and self._bad is None:
            with self._spent:
                self._losses.begins(loss, self._progress.step, is_scaled)

    def loss_on_device(
        self, loss: torch.Tensor, returned: Iterable[ReturnedOutputs], is_scaled: bool
    ) -> KeptLoss | None:
        """Likewise, from a loss whose number arrives later: what its graph has saved, while it is there."""
        if self.is_on and self._explains and self._bad is None:
            with suppress_own(Exception):
                return without_modes(kept_loss, loss, returned, is_scaled, sys._getframe(1))
        return None

    def returned(self, info: ModuleInfo, args: Any, kwargs: Any, output: Any) -> None:
        """A call has returned. Run it again if it can have made the value."""
        bad, page = self._bad, info.root.page
        if bad is None or page is None or page.number != bad.page.number or output is None:
            return
        if bad.frame.phase == FramePhase.BACKWARD:  # it is a checkpointed forward that ran again
            return
        if ends_by_another_watch():  # torch is within its table of hooks, which a second run would change
            self._end("another watch of the model has ended the call")
            return
        if threading.get_ident() == self._running.thread:
            begun_with = self._random if not self._running.stack else None
            contexts = contexts_of_this_thread(function_modes())
            call = KeptCall(info, page.number, self._has_issued(info), contexts, random=begun_with)
            call.site = call_site(sys._getframe(1))
            module, (root, method) = info.ref(), self._method
            if module is not None and id(unwrap(module)) == root and info not in self._running.stack:
                call.method = method  # else `training_step` has called its own module
            with self._spent:
                self._look_into(call, args, kwargs)

    def conclude(self) -> str:
        """The job ends. Where it was made, as a clause; "" if that is not known, and the record says why."""
        self.explained.ends()
        with self._spent:
            self._look_when_it_ends()
        if self._bad is not None:
            self._end(self._why)
        return self._found

    def _look_when_it_ends(self) -> None:
        bad = self._bad
        kept = self._roots_kept.get(bad.page.root) if bad is not None else None
        if bad is not None and bad.frame.phase == FramePhase.BACKWARD:
            self._look_into_backward(bad)
        elif bad is not None and kept is not None and self._is_late:
            inputs, why = self._inputs_of(kept, bad)
            self._why = self._why if why == _INPUTS_GONE else why
            if not why:
                self._look_into(kept, *inputs)
            elif not any(map(is_kept_weakly, _pytree.tree_leaves(inputs))):
                self._end(self._why, lines=self._lines_in(kept, bad, *inputs))

    def _inputs_of(self, kept: KeptCall, bad: NonFiniteRow) -> tuple[tuple[Any, Any], str]:
        """((args, kwargs) of the call of a root, why they are not what it was handed)."""
        leaves = [still_there(leaf) for leaf in kept.leaves]
        why = ""
        if kept.page != bad.page.number:  # it is a later call
            why = _INPUTS_GONE
        elif self._progress.step != bad.page.step:
            why = "an optimizer step has changed the weights since"
        elif any(map(is_kept_weakly, leaves)):
            why = _INPUTS_GONE
        elif [version_of(leaf) for leaf in leaves if is_tensor(leaf)] != kept.versions:
            why = "what the model was handed was changed in place since"
        inputs = (tuple(leaves), {}) if kept.tree is None else _pytree.tree_unflatten(leaves, kept.tree)
        return inputs, why

    def backward_ends(self, has_arrived: bool) -> None:
        """A backward ends. If its alarm ends the job, all that it used is still there; `has_arrived`: it has none."""
        bad = self._bad
        if bad is not None and bad.frame.phase == FramePhase.BACKWARD and self._backward.may_run_within():
            with self._spent:
                self._look_into_backward(bad)
        if has_arrived:
            self._backward.given.forget()

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
        run = unwrap(module)
        self._random = random_numbers()
        self._method = id(run), redirection(run).get("method_name", "forward")

    def root_returned(self, info: ModuleInfo, args: Any, kwargs: Any) -> None:
        """Keep the call of a root until its next one: small tensors that it was handed, and others only weakly."""
        waits = self._bad is not None and self._bad.page.root == info.root.id
        if info.root.page is not None and info.root.id < _MOST_ROOTS and not waits:
            # pytree takes longer than all the rest
            is_flat = not kwargs and _ONLY_TENSORS.issuperset(map(type, args))
            handed, tree = (args, None) if is_flat else _pytree.tree_flatten((args, kwargs))
            # a mode of the script's would see that the tensors are asked
            leaves, versions = without_modes(_kept, handed) if has_modes() else _kept(handed)
            modes = function_modes()
            ran, contexts = self._has_issued(info), contexts_of_this_thread(modes)
            kept = KeptCall(info, info.root.page.number, ran, contexts, leaves, tree, versions, self._random)
            kept.method, kept.refusal = self._method[1], _refusal_by_modes(modes)
            kept.site = call_site(sys._getframe(1)) if self._is_late else None
            self._roots_kept[info.root.id] = kept

    def _has_issued(self, info: ModuleInfo) -> bool:
        """Whether collectives ran in a call that has just returned: in that of the module that a wrapper wraps."""
        count = issued()
        if count == info.seq:
            return False
        module = info.ref()
        inner = info.root.modules.get(id(unwrap(module)), info) if module is not None else info
        return count > inner.seq

    # -- one call -----------------------------------------------------------------------------------------------

    def _look_into(self, call: KeptCall, args: Any, kwargs: Any) -> None:
        bad, module = self._bad, call.info.ref()
        if bad is None or module is None:
            return
        named = self._roots.find(bad.page.root, bad.frame.module, bad.frame.cls)[1]
        target, run = unwrap(named) if named is not None else None, unwrap(module)
        if target is None or not any(part is target for part in parts_of(run)):
            return
        if run is target and bad.row.role_kind is not RoleKind.OUTPUT and call.method == "forward":
            return
        why = _refusal(call, run)
        if why:
            self._end(why)
            return
        tensors = [leaf for _, leaf in inputs_of(args, kwargs) if isinstance(leaf, torch.Tensor)]
        if any(flags & ~NonFinite.NEGINF for _, flags in (without_modes(numbers_of, leaf) for leaf in tensors)):
            self._why = "the arguments of its call were not finite when that returned"
            return  # a call around it may have made it
        why = _refusal_by_modes(function_modes())
        if why:
            self._end(why)
            return
        eager = runs_eagerly()
        if eager is None or not self._explains:
            self.rerun.write(call, run, args, kwargs)
            self._end(_ONLY_COMPILED)
            return
        found = self.rerun.forward(call, run, ForwardTarget(target, bad.row), args, kwargs, tensors, eager, bad.page)
        if found.is_open:
            self._why = found.why
        else:
            self._end(found.why, found.operation, eagerly=self._is_compiled())

    def _lines_in(self, call: KeptCall, bad: NonFiniteRow, args: Any, kwargs: Any) -> list[PossibleLine]:
        """The lines that may have made the value, as the forward runs with what is there now."""
        module, eager = call.info.ref(), runs_eagerly()
        named = self._roots.find(bad.page.root, bad.frame.module, bad.frame.cls)[1]
        if module is None or eager is None or named is None or not self._explains:
            return []
        run = unwrap(module)
        if _refusal(call, run) or _refusal_by_modes(function_modes()):
            return []
        return self.rerun.lines(call, run, unwrap(named), args, kwargs, eager, bad)

    def _look_into_backward(self, bad: NonFiniteRow) -> None:
        kept, why = self._roots_kept.get(bad.page.root), self._backward.refusal()
        module = kept.info.ref() if kept is not None else None
        if kept is None or module is None or kept.page != bad.page.number:
            self._end(why or "the model was called again since")
            return
        run, (inputs, gone), eager = unwrap(module), self._inputs_of(kept, bad), runs_eagerly()
        why = why or gone or _refusal(kept, run) or _refusal_by_modes(function_modes())
        if not why and eager is None:
            why = _ONLY_COMPILED
        if why or eager is None:
            self._end(why)
            return
        found = self._backward.run(kept, run, inputs, [*kept.contexts, eager], partial(self.rerun.run_once, kept, run))
        self._end(found.why, found.operation, eagerly=self._is_compiled())

    def _end(
        self,
        why: str = "",
        operation: BadOperation | None = None,
        eagerly: bool = False,
        lines: Sequence[PossibleLine] = (),
    ) -> None:
        bad, self._bad, self.is_on = self._bad, None, False
        assert bad is not None
        where = self._progress.where_of(bad.page, bad.frame)
        if self._explains:
            modules = self._roots.infos[bad.page.root].modules.values()
            name = operation.module if operation is not None else None
            cls = next((info.cls for info in modules if info.name == name), "")
            odd, trials, took_s = self.rerun.odd, self.rerun.trials, self._spent.seconds
            ran = SecondRun(where, operation, why, eagerly, odd, trials, cls, took_s, list(lines))
            self._progress.recorder.append(ran)
        if self._captures:
            file = self.rerun.capture.result or CaptureFile(refused=why or "the batch ran under --explain")
            self._progress.recorder.append(ForwardCaptured(where, file))
        if operation is not None:
            at = f" at {operation.file}:{operation.line}" if operation.file else ""
            code = shown_line(operation.code, operation.columns, CODE_WIDTH)
            self._found = f"{operation.op} made it{at}{f': {code}' if code else ''}"


def _refusal(call: KeptCall, run: nn.Module) -> str:
    """Why a call may not run again, as a clause; "" if it may."""
    if call.method != "forward" and not getattr(run, "automatic_optimization", True):
        return f"`{call.method}` runs backward and optimizer itself, and so does not run again"
    if call.refusal:
        return call.refusal
    if call.issued:
        return "collectives ran within the call; with --sync a part of it without collectives may run again"
    return ""


def _kept(handed: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """The leaves of a call's arguments, none of which is a large one that only this keeps; versions of the tensors."""
    leaves: list[Any] = []
    versions: list[int] = []
    for leaf in handed:
        if is_tensor(leaf):
            versions.append(version_of(leaf))
            leaves.append(kept_tensor(leaf))
        else:
            leaves.append(kept_object(leaf))
    return leaves, versions


def _placed(looked_at: BadOperation | None, watched: BadOperation | None) -> BadOperation | None:
    """The operation of a loss as its graph tells it, with what was tried, at the line where it was seen to run."""
    if looked_at is None or watched is None or looked_at.op != watched.op:
        return watched or looked_at
    return msgspec.structs.replace(
        looked_at, file=watched.file, line=watched.line, code=watched.code, columns=watched.columns
    )


def _refusal_by_modes(modes: list[Any]) -> str:
    """Why nothing may run again under the modes of the script, as a clause; "" if it may.

    `modes`: this thread's `function_modes`.
    """
    if has_transforms():
        return "a transform of torch.func was on, such as vmap"
    if _dispatch_modes() or (modes and any(type(mode).__name__ != "DeviceContext" for mode in modes)):
        return "the script has a mode of torch on"
    return ""
