"""Our hooks in torch's global tables, and the module calls that run: for every call and every optimizer step.

A script or a library may clear these tables. Calls until the hooks are back have no frames, so it must be detected.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from ...core.events.run_position import RunPosition
from ...core.frames import FramePhase
from ...core.recorder.layout import NOTHING, HeadField
from ...core.signal_errors import then_put_back
from ..patches import PatchLedger
from ..record.autograd_graph import GraphCalls
from ..record.names import CALL, parameters_of, parts_of
from ..record.progress import RunProgress
from ..record.roots import ModuleInfo, RootInfo, is_in_parts

T = TypeVar("T")
_this_thread = threading.get_ident
_ON_CALLS = 2
"""The first entries: the hooks before and after a module's forward."""
_LEFT_OUT = int(HeadField.CALLS_LEFT_OUT)


class RunningCalls:
    """The module calls of a rank that have begun and not returned. They are of one thread: that of the root's call."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self.stack: list[ModuleInfo] = []
        """The outermost call first. The list stays the same."""
        self.depths: list[int] = []
        """For each call on the stack: the number of calls around it, wrappers not counted. The list may be longer."""
        self.starts: list[tuple[int, int, int]] = []
        """For each call on the stack: `seq`, `first_node` and `entered` of its ModuleInfo as it began, which a call of
        the same module within it has changed since. The list may be longer."""
        self.thread = 0
        self.outer_exception: BaseException | None = None
        """The exception that was being handled when the root was called."""
        self.phase = FramePhase.FORWARD
        self.nodes: GraphCalls | None = None
        """The autograd nodes of the calls of the root; None if no gradients are recorded."""
        self.page_with_threads = -1
        """Number of the last page in whose forward modules were called in another thread."""
        self._sharded: dict[int, bool] = {}
        """id of a root -> see `gathers`."""

    def begin(self, phase: FramePhase, nodes: GraphCalls | None) -> None:
        """A root is called."""
        self.phase, self.nodes = phase, nodes
        # Not always the main thread. A checkpoint's recompute runs where its backward runs, which for nodes on a device
        # is a thread of autograd's (torch/csrc/autograd/engine.h, start_device_threads).
        self.thread = _this_thread()
        # the script may call the model within an `except` block: that exception is not one of the forward's
        self.outer_exception = sys.exc_info()[1]

    def where(self) -> RunPosition:
        """The place in the run, for an event."""
        return self._progress.where(root=self.stack[0].root.label if self.stack else None)

    def innermost(self) -> torch.nn.Module | None:
        """The module whose call began last."""
        return self.stack[-1].ref() if self.stack else None

    def first_nodes(self) -> list[tuple[ModuleInfo, int]]:
        """Each running call, the outermost first, and the number of the first node that it could make."""
        return [(info, start[1]) for info, start in zip(self.stack, self.starts, strict=False)]

    def parent(self) -> int:
        """The id of the module whose code made the last call: the nearest one around it that is not a wrapper."""
        stack = self.stack
        for position in range(len(stack) - 2, -1, -1):
            if not stack[position].is_wrapper:
                return stack[position].id
        return NOTHING

    def is_sharded(self) -> bool:
        """Whether the running root gathers weights between its calls. Those collectives write into no argument."""
        return self.gathers(self.stack[0].root)

    def gathers(self, root: RootInfo) -> bool:
        """Whether FSDP or DeepSpeed's ZeRO 3 gathers weights between the calls of a root, and frees them after each."""
        known = self._sharded.get(root.id)
        if known is None:
            module = root.ref()
            parts = parts_of(module) if module is not None else ()
            # by name: nothing of torch.distributed is imported that the script does not use
            classes = {cls.__name__ for part in parts for cls in type(part).__mro__}
            known = bool(classes & {"FSDPModule", "FullyShardedDataParallel"})
            known = known or (module is not None and any(map(is_in_parts, parameters_of(module))))
            self._sharded[root.id] = known
        return known

    def drop_dead(self, called: torch.nn.Module | None = None) -> None:
        """Clear the stack if an interrupt, or cleared torch hooks, ended a forward without our hooks.

        `called`: the module whose call begins, and has no entry yet. Slow, and rarely needed.
        """
        if not self.stack:
            return
        innermost = self.stack[-1].ref()
        is_own = called is innermost and _this_thread() == self.thread
        # torch does not call `after` when a forward ends with KeyboardInterrupt (_call_impl: `except Exception`), nor
        # when the table of forward hooks was cleared. So the thread's own frames decide: while the innermost call runs,
        # a frame of `_call_impl` has its module.
        frame: FrameType | None = sys._current_frames().get(self.thread)
        while frame is not None:
            if frame.f_code is CALL and frame.f_locals.get("self") is innermost:
                if not is_own:
                    return
                is_own = False  # the frame of the call that begins: it may have been interrupted before
            frame = frame.f_back
        self.stack.clear()

    def leave_out_thread(self) -> None:
        """A call in a second thread within one forward: it has no order relative to the first thread's calls."""
        page, fields = self._progress.recorder.page, self._progress.fields
        self.page_with_threads = page.number if page is not None else -1
        if not fields[_LEFT_OUT]:
            fields[HeadField.LEFT_OUT_PAGE] = self.page_with_threads
        fields[_LEFT_OUT] += 1


HANDS_OVER_KWARGS = "with_kwargs" in inspect.signature(torch_module.register_module_forward_hook).parameters
"""Whether torch passes keyword arguments to a global forward hook. torch 2.5 does not: its frames lack them."""

_FLAGS = (*(["_global_forward_hooks_with_kwargs"] if HANDS_OVER_KWARGS else []), "_global_forward_hooks_always_called")
"""Tables that hold True for a forward hook that was registered so."""


class GlobalHooks:
    """The global hooks of one rank."""

    def __init__(self, running: RunningCalls, progress: RunProgress) -> None:
        self._running = running
        self._fields = progress.fields
        self.handles: list[Any] = []
        """torch's handles; [] while no hook is registered."""
        self.are_away = False
        """Whether `without_ours` has taken them off."""
        self._entries: list[tuple[ModuleType, str, dict[int, Any], int, Any]] = []
        """(torch's module, name of its table, the table then, key, value) of all that torch must hold.

        A script may have replaced a table since.
        """

    def attach(self, *hooks: Callable[..., Any]) -> None:
        """Register those before and after a module's forward, and before and after an optimizer's step.

        They fire for existing modules and optimizers and for those made later.
        """
        # Global hooks of modules run before those of the module itself (torch/nn/modules/module.py, _call_impl). Of an
        # optimizer the global hook is the first before its step and the last after it (torch/optim/optimizer.py,
        # profile_hook_step). So the weights are read after other hooks have changed them. Where others come after the
        # one before a step, last_pre_hook.py reads the gradients.
        before, after, before_step, after_step = hooks
        extra = {"with_kwargs": True} if HANDS_OVER_KWARGS else {}
        of_before = torch_module.register_module_forward_pre_hook(before)
        # always_call: the stack must also shrink when a forward raises
        of_after = torch_module.register_module_forward_hook(after, always_call=True, **extra)
        of_step = torch_optimizer.register_optimizer_step_pre_hook(before_step)
        of_stepped = torch_optimizer.register_optimizer_step_post_hook(after_step)
        self.handles = [of_before, of_after, of_step, of_stepped]
        entries = [
            (torch_module, "_global_forward_pre_hooks", of_before.id, before),
            (torch_module, "_global_forward_hooks", of_after.id, after),
            *((torch_module, flag, of_after.id, True) for flag in _FLAGS),
            (torch_optimizer, "_global_optimizer_pre_hooks", of_step.id, before_step),
            (torch_optimizer, "_global_optimizer_post_hooks", of_stepped.id, after_step),
        ]
        self._entries = [(place, name, getattr(place, name), key, value) for place, name, key, value in entries]
        _attached.add(self)

    def are_last_before_step(self, optimizer: Any) -> bool:
        """Whether no pre-hook of others comes after ours in a step of this optimizer."""
        if not self.handles:
            return True
        last = next(reversed(torch_optimizer._global_optimizer_pre_hooks), None)
        return last == self.handles[2].id and not optimizer._optimizer_step_pre_hooks

    def reinstall(self) -> None:
        """Register cleared hooks again; calls in the meantime were not recorded.

        Each hook gets its old key: code that then restores the table's earlier entries finds the hook once, not twice.
        """
        # The tables are one set for the whole process, and torch tells nobody when an entry goes.
        # `_global_forward_hooks.clear()` in a library takes ours out as well. Without a look at the tables the rest of
        # the run would seem to have no calls and no overflow.
        gone = False
        for place, name, _, key, value in self._entries:
            table = getattr(place, name)
            if key not in table:
                # at the end of the table: hooks of others that were registered since run before it from now on
                table[key] = value
                gone = True
        if gone:
            # the calls that ended in the meantime have not left the stack
            self._running.drop_dead()
            fields = self._fields
            if not fields[HeadField.HOOKS_GONE]:
                fields[HeadField.GONE_PAGE] = fields[HeadField.PAGE]
            fields[HeadField.HOOKS_GONE] += 1

    def take_off_calls(self) -> None:
        """Take the two hooks on calls of modules out of their tables, until `put_on_calls` or `reinstall`."""
        for place, name, _, key, _ in self._entries[:_ON_CALLS]:
            getattr(place, name).pop(key, None)

    def put_on_calls(self) -> None:
        """Put them back in front, unless they were detached since, or others have changed the tables."""
        for place, name, _, key, value in self._entries[:_ON_CALLS]:
            table = getattr(place, name)
            others = dict(table)
            table[key] = value
            for other, hook in others.items():
                if other in table and other != key:
                    del table[other]
                    table[other] = hook

    def without_ours(self, run: Callable[[], T]) -> T:
        """Call `run` without our hooks on modules and optimizers. Then these are back at their places among others'."""
        ours = {handle.id for handle in self.handles}
        tables = [table for handle in self.handles if (table := handle.hooks_dict_ref()) is not None]
        before = [dict(table) for table in tables]
        were_away = self.are_away

        def go() -> T:
            self.are_away = True
            for table in tables:
                for each in ours & table.keys():
                    del table[each]
            return run()

        def put_back() -> None:
            theirs = ours & {handle.id for handle in self.handles}  # they may have been detached since
            for table, earlier in zip(tables, before, strict=True):
                # a dictionary has no insertion at a place: each is entered anew, the earlier ones first, then those
                # added meanwhile. A signal's handler may raise after any call, so none lies between `del` and the entry
                since = dict(table)
                kept = {each: hook for each, hook in earlier.items() if each in theirs or each in since}
                for each, hook in {**kept, **since}.items():
                    if each in table:
                        del table[each]
                    table[each] = hook
            self.are_away = were_away

        return then_put_back(go, put_back)

    def detach(self) -> None:
        """Remove them."""
        for handle in self.handles:
            handle.remove()
        # torch (up to at least 2.13) does not clean all three tables of a forward hook
        for place, name, table, key, _ in self._entries:
            table.pop(key, None)
            getattr(place, name).pop(key, None)
        self.handles, self._entries = [], []
        _attached.discard(self)


_attached: weakref.WeakSet[GlobalHooks] = weakref.WeakSet()
"""Those of a run and of each `gpuwatch.watch`."""


def without_any_of_ours(run: Callable[[], T]) -> T:
    """Call `run` without the hooks of any watch of this process: its calls are no batch, and no alarm comes of them."""
    for hooks in list(_attached):
        run = partial(hooks.without_ours, run)
    return run()


_EXPORTS = ("export", "export_for_training", "export_for_inference", "draft_export")
"""Functions of torch.export that trace a module. The first is in every torch, the others are not."""


def patch_exports(hooks: GlobalHooks, patches: PatchLedger) -> None:
    """Have `torch.export` trace a model without our hooks: its calls are no training.

    With `strict=True` it refuses a model while any global hook is attached (torch 2.13).
    """

    def without_hooks(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def export(*args: Any, **kwargs: Any) -> Any:
            return hooks.without_ours(partial(call, *args, **kwargs))

        return export

    for name in _EXPORTS:
        if name in vars(torch.export) or name == _EXPORTS[0]:
            patches.replace(torch.export, name, without_hooks)
