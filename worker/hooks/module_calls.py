"""Module calls: torch's global hook before each. Like the one after it (returned_calls.py), it only records.

record/judging.py hands a frame to the judge once its numbers are there. Nothing here raises into the training except
the abort that the user asked for, and what a signal's handler has raised meanwhile, which is the script's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from ...core.frames import FramePhase
from ...core.recorder.layout import HeadField, RankPhase
from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from ..compile.attach import apart_from_dynamo
from ..record.autograd_graph import GraphCalls, next_node
from ..record.collectives import issued
from ..record.names import class_of
from ..record.root_tensors import RootTensors
from ..record.roots import ModuleInfo, RootInfo
from .hook_bounds import call_begins, compiler, is_dynamo_compiling, is_tracing, trace_before, work_ends
from .quiet_root import QuietRoot
from .returned_calls import ReturnedCalls

_graph_task = name_in_torch("torch._C._current_graph_task_id", lambda: -1)
_this_thread = threading.get_ident
_MODULE = int(HeadField.MODULE)


@dataclass(eq=False, repr=False)
class ModuleCalls(ReturnedCalls):
    """The module calls of one rank. torch calls `before` and `after`."""

    _root_tensors: RootTensors

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept = self._progress.kept
        self._grads = "grads" in self._progress.settings.watch
        self._quiet = QuietRoot(self._global, apart_from_dynamo(self.after))

    # -- called by torch ----------------------------------------------------------------------------------------

    # The order in one call (torch/nn/modules/module.py, _call_impl):
    # before, the module's own pre-hooks, forward, after, the module's own forward hooks.
    # So FSDP2, whose hooks are the module's own, gathers weights after `before` and frees them after `after`: they are
    # whole in `after`, and only there. A hook of the module's own may replace the result after it was recorded: the row
    # of whatever gets it shows the other one.
    # torch also calls `after` when the forward or any pre-hook has raised an Exception (always_call). It does not on
    # KeyboardInterrupt and SystemExit, which leave entries on the stack.

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """A module is called."""
        # within torch.compile and torch.export (torch/compiler, is_compiling) tensors hold no numbers, as they trace.
        # Dynamo, which traces this function too, takes the first for True, and comes to no dictionary
        if is_dynamo_compiling() or compiler["_is_compiling_flag"]:
            if is_dynamo_compiling():
                trace_before(module)
            return
        # before any other call of ours: a hook may take only a few frames until here (worker/native/recursion.c)
        call_begins()
        try:
            # then, at once: what a signal's handler has raised must not wait for our own work
            if self._kept:
                self._progress.raise_kept()
            # a skipped root is not on the stack: all calls within it end here
            if self._skipping.root is not None and self._skipping.holds(module):
                if self._around_graphs and class_of(module) in self._around_graphs:
                    self._skip_graphs()
                return
            # torch.jit.trace calls the model to record its operations: that is no batch
            if is_tracing():
                return
            try:
                # Only an Exception of gpuwatch's own ends here. A signal's handler runs in the main thread wherever
                # CPython looks for signals (core/recorder/writer.py), and so within this call, too. What it raises is
                # the script's: a checkpoint at preemption, an alarm, Ctrl-C. All handlers of errors in this folder ask
                # `from_outside` for this reason.
                self._enter(module)
            except Exception as error:
                if from_outside(error):
                    raise
                self._fault("forward pre-hook", error)
            # an alarm ends the job where a root begins: then no module of the script's is half done
            if self._judging.pending is not None and len(self._stack) == 1:
                self._judging.raise_pending()
        finally:
            work_ends()

    def _skip_graphs(self) -> None:
        with self._progress.faults.within("forward pre-hook"), self._lock:
            self._graphs.skip()

    # -- before a module's forward ------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module) -> None:
        stack = self._stack
        info = stack[0].root.modules.get(id(module)) if stack else None
        # A dictionary by id, and then `is`: an id may belong to another module once the first one is freed
        # (docs.python.org/3/library/functions.html#id). The root within itself means that its last call has ended
        # without `after`, or that it calls itself: `drop_dead` finds out.
        if info is None or info is stack[0] or info.guessed or info.ref() is not module:
            if stack:
                # the stack may be that of a forward which KeyboardInterrupt has ended
                self._running.drop_dead(module)
            if not stack:
                interrupted = self._recorder.page if self._lock.is_held_here() else None
                with self._lock:
                    info = self._enter_root(module)
                self._interrupted = interrupted
            # calls of two threads would be taken for calls within each other: the stack is of the root's thread alone
            elif _this_thread() == self._running.thread:
                info = self._roots.child(module, stack[0].root, stack[-1])
            else:
                self._running.leave_out_thread()
                info = None
            if info is None:
                return
        elif _this_thread() != self._running.thread:
            self._running.leave_out_thread()
            return
        if self._around_graphs and stack and not info.is_graph:
            # the graphs that the caller has run so far come before this call, as in the forward
            self._frames.record_graphs(len(stack) - 1)
        if self._around_graphs and info.cls in self._around_graphs:
            self._graphs.discard()
        # what is issued between here and the frame was issued within the call
        info.seq = issued()
        if self._running.nodes is not None:
            # autograd numbers its nodes in each thread as they are made: this call makes those from here on
            info.first_node = next_node()
        if info.is_wrapper:
            info.entered = self._recorder.frame_count
        position = len(stack)
        if position == len(self._depths):
            self._depths.append(0)
        if position == len(self._starts):
            self._starts.append((-1, 0, 0))
        # no call from here to the last one: a handler's module would take this position
        self._starts[position] = info.seq, info.first_node, info.entered
        if position:
            self._depths[position] = self._depths[position - 1] + (not stack[position - 1].is_wrapper)
        # after all that may fail: without an entry `after` records nothing of this call
        stack.append(info)
        self._fields[_MODULE] = info.id

    def _enter_root(self, module: torch.nn.Module) -> ModuleInfo | None:
        """A module is called while no other one runs. None if this batch is skipped or the module is not watched."""
        if self._skipping.leaves_out(module):
            return None
        # A table may have been cleared since the last batch. If it was that of the pre-hooks, this is not called: the
        # next step of an optimizer has them put back.
        self._global.reinstall()
        info, opens_batch = self._roots.enter(module)
        root, phase = info.root, FramePhase.FORWARD
        # A module that is called while autograd runs is run again by an activation checkpoint
        # (torch/utils/checkpoint.py). Its frames belong to the page of that backward and begin no batch. For a model on
        # a device this thread is one of autograd's, and it is the thread of the stack until the call returns.
        if root.page is not None and _graph_task() != -1:
            if self._skipping.skips_again(module):
                return None
            page = self._gradients.page_of(root) or root.page
            phase = FramePhase.RECOMPUTE
            self._progress.resume(page)
        else:
            self.end_last_batch(root)
            if self._skipping.skips(module, info, opens_batch):
                self._skipped_root_begins(module, info)
                return None
            page = self._progress.begin_page(root)
            self._progress.times.forward_begins()
        self._rows.begin_page(page.batch)
        if self._explainer.is_on:
            self._explainer.root_begins(module)
        # under no_grad autograd makes no nodes, so there are none to remember
        self._running.begin(phase, GraphCalls(page.number) if self._grads and torch.is_grad_enabled() else None)
        self._progress.enter(RankPhase.FORWARD)
        if phase is FramePhase.FORWARD and opens_batch:
            self._root_tensors.read(root, module, page)
            self._explainer.batch_begins(module, page)
        return info

    def _skipped_root_begins(self, module: torch.nn.Module, info: ModuleInfo) -> None:
        if self._explainer.is_on:
            self._explainer.root_begins(module)
            info.seq, info.first_node = issued(), next_node()
            self._running.begin(FramePhase.FORWARD, None)
        if not self._around_graphs:
            self._quiet.begins(module)

    def end_last_batch(self, root: RootInfo) -> None:
        """The next batch of a root begins."""
        is_host = self._rows.device_buffer is None and not self._around_graphs
        if is_host and root.page is not None and not root.page.segments:  # a skipped batch with nothing to show
            self._gradients.skipped_batch_ends()
            return
        if root.page is not None:
            self._explainer.batch_ends(root.page.number)
        # what compiled code left of the last batch is written while its forward counts as running
        self._graphs.record()
        self._graphs.batch_ends(root)
        if root.page is not None:
            self._judging.forward_ends(root.page)  # an interrupt may have ended it without its hooks
        self._judging.collect()
        if root.page is not None:
            self._judging.held.batch_ended(root.page)
        # last: it lets go of graphs, and `collect` above may have asked them where a gradient was made
        self._gradients.batch_begins()
