"""Module calls: torch's global hooks before and after each. They only record.

record/judging.py hands a frame to the judge once its numbers are there. Nothing here raises into the training except
the abort that the user asked for, and what a signal's handler has raised meanwhile, which is the script's.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...core.errors import JobEnded
from ...core.events.alarm_evidence import BatchInputs
from ...core.frames import FramePhase
from ...core.guest.tell import tell
from ...core.recorder.layout import HeadField, RankPhase
from ...core.recorder.writer import OpenPage
from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from ..answers import look_at_stack_file
from ..compile import attach as traced
from ..compile.attach import apart_from_dynamo
from ..device.device import without_modes
from ..record.autograd_graph import GraphCalls, next_node
from ..record.bad_elements import bad_inputs, bad_rows
from ..record.collectives import issued
from ..record.names import batch_digest, class_of, inputs_of
from ..record.root_tensors import RootTensors
from ..record.roots import ModuleInfo, RootInfo
from .call_frames import CallFrames
from .global_hooks import GlobalHooks
from .quiet_root import QuietRoot
from .skipping import BatchSkipping

try:
    from ..native.recursion import call_begins, call_ends, work_begins, work_ends
except ImportError:  # not built: the hooks' share of the recursion limit is not given back
    call_begins = call_ends = work_begins = work_ends = lambda: None

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_tracing = name_in_torch("torch._C._is_tracing", lambda: False)
_graph_task = name_in_torch("torch._C._current_graph_task_id", lambda: -1)
_this_thread = threading.get_ident
_MODULE = int(HeadField.MODULE)


class _CompilerFlag(dict[str, bool]):
    """In place of torch.compiler's variables with a torch that has no such flag."""

    def __missing__(self, name: str) -> bool:
        return torch.compiler.is_compiling()


_compiler: dict[str, Any] = vars(torch.compiler) if "_is_compiling_flag" in vars(torch.compiler) else _CompilerFlag()
"""Has what torch.compiler.is_compiling() returns where dynamo does not trace. That is two functions of Python, for each
hook of each call."""


class AlarmExplainer(Protocol):
    """What is told of calls so that an alarm can be explained once the job ends: worker/explain/second_run.py."""

    is_on: bool
    """False once an alarm was explained."""
    keeps_roots: bool
    """Whether it needs the arguments of roots."""

    def root_begins(self, module: torch.nn.Module) -> None:
        """The first module of a forward is called."""

    def root_returned(self, info: ModuleInfo, args: Any, kwargs: Any) -> None:
        """Its call has returned."""

    def returned(self, info: ModuleInfo, args: Any, kwargs: Any, output: Any) -> None:
        """A call has returned, of any module."""

    def batch_begins(self, module: torch.nn.Module, page: OpenPage) -> None:
        """A batch of a root begins."""

    def batch_ends(self, page: int) -> None:
        """A root begins its next batch after the one of this page."""


class BatchFinder(Protocol):
    """What is told of the arguments of roots, to find their samples: worker/explain/batch_source.py."""

    def root_returned(self, page: OpenPage, args: Any, kwargs: Any) -> None:
        """The forward of a root is over."""


@dataclass(eq=False, repr=False)
class ModuleCalls:
    """The module calls of one rank. torch calls `before` and `after`."""

    _frames: CallFrames
    _skipping: BatchSkipping
    _global: GlobalHooks
    _explainer: AlarmExplainer
    _root_tensors: RootTensors
    _finder: BatchFinder

    def __post_init__(self) -> None:
        self._running, self._gradients = self._frames.running, self._frames.gradients
        self._stack, self._depths, self._starts = self._running.stack, self._running.depths, self._running.starts
        self._graphs, self._around_graphs = self._frames.graphs, self._frames.policy.around
        parts = self._frames.frames
        self._progress, self._roots, self._rows = parts.progress, parts.roots, parts.rows
        self._judging, self._masks = parts.judging, parts.judging.masks
        self._recorder, self._fields = self._progress.recorder, self._progress.fields
        self._lock, self._fault = self._progress.lock, self._progress.faults.record
        self._kept = self._progress.kept
        settings = self._progress.settings
        self._sync = settings.sync
        self._grads = "grads" in settings.watch
        self._quiet = QuietRoot(self._global, apart_from_dynamo(self.after))
        self._last_batch = settings.abort_after_batch
        self._interrupted: OpenPage | None = None
        """A signal's handler may call the model while a hook of ours writes: the page of that hook. It is made the
        current page again when the handler's call returns. Else None."""

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
        if _is_dynamo_compiling() or _compiler["_is_compiling_flag"]:
            if _is_dynamo_compiling() and traced.before is not None:
                traced.before(module)
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
            if _is_tracing():
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

    def after(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """A module has returned, or raised: then its output is None."""
        # `rest` is (kwargs, output). When the forward raised, torch (up to at least 2.13) omits kwargs in a global hook
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        if _is_dynamo_compiling() or _compiler["_is_compiling_flag"]:
            if _is_dynamo_compiling() and traced.after is not None:
                traced.after(module, args, kwargs, output)
            return
        work_begins()
        try:
            if self._skipping.root is not None:
                if self._skipping.root() is module:
                    self._skipped_root_ends(module, args, kwargs, output)
                return
            if not self._stack or _is_tracing():
                return
            info, finished = self._stack[-1], None
            try:
                finished = self._leave(module, args, kwargs, output)
            except Exception as error:
                if from_outside(error):
                    # torch (_call_impl, for always_call) silences what a hook raises while another error is raised: it
                    # only warns
                    if error.__context__ not in (None, self._running.outer_exception):
                        # the next hook of ours raises it
                        self._progress.keep(error)
                        return
                    raise
                self._fault("forward hook", error)
                return
            if self._sync and output is not None:
                with self._progress.faults.within("forward hook"):
                    self._judging.finish()
            # arguments and result of the call are at hand only here
            if self._judging.pending is not None and info.ref() is module:
                with self._progress.faults.within("a second run"):
                    self._explainer.returned(info, args, kwargs, output)
            if finished is not None:
                self._batch_ended(finished)
            if self._sync and output is not None:
                self._judging.raise_pending()
        finally:
            call_ends()

    def _skipped_root_ends(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """May raise OverflowDetected."""
        self._skipping.ends(module, output)
        if self._judging.pending is not None:
            with self._progress.faults.within("a second run"):
                self._explainer.returned(self._roots.enter(module)[0], args, kwargs, output)
            self._judging.raise_pending()

    def _skip_graphs(self) -> None:
        with self._progress.faults.within("forward pre-hook"), self._lock:
            self._graphs.skip()

    def _batch_ended(self, root: RootInfo) -> None:
        """The root's forward has returned. Raises only OverflowDetected, or JobEnded for --abort-after-batch."""
        look_at_stack_file()
        if self._judging.pending is not None:
            self._judging.raise_pending()
        batch = self._progress.batch
        if self._last_batch is not None and root.id == self._skipping.first_root and batch >= self._last_batch:
            tell(f"gpuwatch: rank {self._progress.rank}: ending after batch {batch}: --abort-after-batch")
            raise JobEnded(0)

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
            if self._skipping.skips(module, root, opens_batch):
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
            info.seq = issued()
            self._running.begin(FramePhase.FORWARD, None)
        if not self._around_graphs:
            self._quiet.begins(module)

    def end_last_batch(self, root: RootInfo) -> None:
        """The next batch of a root begins."""
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

    # -- after a module's forward -------------------------------------------------------------------------------

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> RootInfo | None:
        """Record the frame. Returns the root whose batch has ended with it."""
        stack, running, rows = self._stack, self._running, self._rows
        # The order below:
        #  1. find the entry of this call, as calls above it may have ended without `after`
        #  2. note whether it raised, its autograd nodes, and its collectives, before anything of ours can change them
        #  3. forget what a collective within the call may have changed, before its arguments are looked up; not in a
        #     sharded model, whose weights every call gathers anew
        #  4. write the frames of graphs that ran in the call, which come before its own
        #  5. write its frame
        #  6. read the masks among its arguments that lie on a device (record/late_masks.py)
        #  7. if FSDP or ZeRO 3 shards the model: start the readings of weights that still wait, since FSDP's own
        #     forward hook runs right after this one, and frees the weights
        #  8. take the entry off, also if 4 to 7 have raised. If 1 to 3 raise, the entry stays until a call around it
        #     returns (1.), or a module that is not known yet is called (`drop_dead`)
        #  9. if it was the outermost call: pause the page, judge, record the inputs (`_leave_root`). The backward
        #     writes on in it, and the root's next batch ends it
        if _this_thread() != running.thread:
            return None
        info = stack[-1]
        # torch runs this hook after an Exception alone (_call_impl: `except Exception`). A KeyboardInterrupt that the
        # script catches in an outer module leaves the entries of the inner ones: they are dropped here.
        while info.ref() is not module:
            if not any(entered.ref() is module for entered in stack):
                return None  # entered before the hooks were attached
            stack.pop()
            info = stack[-1]
        # `output` is None if the forward has raised, and also if it returned None. It has raised if Python handles an
        # exception now that it did not handle when the root was called. The script may call its model within an
        # `except` block: that exception was there before.
        raised = output is None and sys.exc_info()[1] not in (None, running.outer_exception)
        info.seq, info.first_node, info.entered = self._starts[len(stack) - 1]
        if running.nodes is not None:
            # our own operations make no node, since they run with gradients off: the number is still that of the
            # script's next
            running.nodes.calls.append((info, info.first_node, next_node()))
        page, seq = self._recorder.page, issued()
        shards = rows.device_buffer is not None and running.is_sharded()
        if rows.device_buffer is not None and not shards and rows.may_have_changed(seq):
            # `without_modes` goes around what calls torch's operations. A TorchFunctionMode or TorchDispatchMode of the
            # script's would see them, and may count or change them (torch/overrides.py,
            # torch/utils/_python_dispatch.py). With gradients on they would make nodes, and move the script's numbers.
            without_modes(rows.forget_changed_arguments, args, kwargs)
        try:
            position = len(stack) - 1
            has_graphs = bool(self._around_graphs) and self._frames.record_graphs(position)
            if info.is_wrapper:
                with self._lock:
                    self._frames.record_wrapper(info, module, args, kwargs, output, raised)
            elif info.watched:
                caller, writer = stack[position - 1], self._gradients.writer
                parent = running.parent() if caller.is_wrapper or not position else caller.id
                depth, phase, step = self._depths[position], running.phase.number, self._progress.step
                # The writer in C comes first. For tensors in host memory it takes no lock (see RecorderLock), and it
                # returns False, with nothing written, for a frame that is not ordinary. Only then Python writes, under
                # the lock.
                if (
                    writer is None
                    or has_graphs
                    or output is None
                    or page is None
                    or not writer.frame(info, module, args, kwargs, output, page, parent, depth, phase, step, seq)
                ):
                    with self._lock:
                        reader = self._graphs if has_graphs else rows
                        without_modes(self._frames.record, info, module, args, kwargs, output, raised, reader)
            if self._masks.slots and page is not None and not raised:
                with self._lock:
                    self._masks.read(info, page, args, kwargs)
            if shards:
                # FSDP2's own hook of this module (_fsdp_state.py, _post_forward) comes next, and frees the weights
                with self._lock:
                    rows.read_waiting()
        finally:
            # also when a handler has raised: torch does not call this hook twice for one call
            stack.pop()
        if stack:
            self._fields[_MODULE] = stack[-1].id
            return None
        return self._leave_root(info, args, kwargs, output, raised)

    def _leave_root(self, info: ModuleInfo, args: Any, kwargs: Any, output: Any, raised: bool) -> RootInfo | None:
        is_again, nodes = self._running.phase is FramePhase.RECOMPUTE, self._running.nodes
        self._global.reinstall()  # the script may have cleared the tables within the forward
        interrupted, self._interrupted = self._interrupted, None
        with self._lock:
            self._graphs.record()  # while the page is open: these are its last frames
            page = self._recorder.page
            self._recorder.pause_page()
            self._rows.flush()
            if page is not None:
                self._judging.forward_ends(page)
            self._judging.collect()
            self._gradients.release()
            if not (raised or is_again):  # after `collect`, which says whether this page has the first alarm
                self._record_inputs(page, args, kwargs)
            if page is not None and not is_again:
                self._finder.root_returned(page, args, kwargs)
            if nodes is not None and page is not None and not raised:
                without_modes(self._gradients.watch_graph, nodes, output, page)
            self._running.nodes = None
            if self._explainer.keeps_roots and not (raised or is_again):
                self._explainer.root_returned(info, args, kwargs)
            if interrupted is not None:  # the hook goes on to write there
                self._progress.resume(interrupted)
                self._rows.begin_page(interrupted.batch)
        self._progress.enter(RankPhase.BACKWARD if is_again else RankPhase.SCRIPT)
        self._fields[HeadField.SEQ] = issued()
        if raised or is_again:
            return None
        self._progress.times.forward_ends()
        return info.root

    def _record_inputs(self, page: OpenPage | None, args: Any, kwargs: Any) -> None:
        """Record digests of the model's inputs if this forward had the first bad value."""
        if page is not None and page.number == self._judging.first_alarmed:
            handed = inputs_of(args, kwargs)
            digests, bad = without_modes(batch_digest, handed), without_modes(bad_inputs, handed)
            if digests:
                rows = without_modes(bad_rows, handed) if bad else {}
                self._recorder.append(BatchInputs(self._running.where(), digests, bad, rows))
