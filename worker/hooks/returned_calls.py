"""torch's global hook after each module call: its frame, and after the outermost one all that ends a root's forward."""

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
from ..answers import look_at_stack_file
from ..device.device import without_modes
from ..record.autograd_graph import next_node
from ..record.bad_elements import bad_inputs, bad_rows
from ..record.collectives import issued
from ..record.names import batch_digest, inputs_of
from ..record.roots import ModuleInfo, RootInfo
from .call_frames import CallFrames
from .global_hooks import GlobalHooks
from .hook_bounds import call_ends, compiler, is_dynamo_compiling, is_tracing, trace_after, work_begins
from .skipping import BatchSkipping

_this_thread = threading.get_ident
_MODULE = int(HeadField.MODULE)


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
class ReturnedCalls:
    """The part of ModuleCalls that records a call which has returned, or raised."""

    _frames: CallFrames
    _global: GlobalHooks
    _explainer: AlarmExplainer
    _finder: BatchFinder
    _skipping: BatchSkipping

    def __post_init__(self) -> None:
        self._running, self._gradients = self._frames.running, self._frames.gradients
        self._stack, self._depths, self._starts = self._running.stack, self._running.depths, self._running.starts
        self._graphs, self._around_graphs = self._frames.graphs, self._frames.policy.around
        parts = self._frames.frames
        self._progress, self._rows = parts.progress, parts.rows
        self._judging, self._masks = parts.judging, parts.judging.masks
        self._recorder, self._fields = self._progress.recorder, self._progress.fields
        self._roots, self._fault = parts.roots, self._progress.faults.record
        self._sync, self._last_batch = self._progress.settings.sync, self._progress.settings.abort_after_batch
        self._lock, self._faults = self._progress.lock, self._progress.faults.within("a second run")
        self._interrupted: OpenPage | None = None
        """A signal's handler may call the model while a hook of ours writes: the page of that hook. It is made the
        current page again when the handler's call returns. Else None."""

    def after(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """A module has returned, or raised: then its output is None."""
        # `rest` is (kwargs, output). When the forward raised, torch (up to at least 2.13) omits kwargs in a global hook
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        if is_dynamo_compiling() or compiler["_is_compiling_flag"]:
            if is_dynamo_compiling():
                trace_after(module, args, kwargs, output)
            return
        work_begins()
        try:
            if self._skipping.root is not None:
                if self._skipping.root() is module:
                    self._skipped_root_ends(module, args, kwargs, output)
                return
            if not self._stack or is_tracing():
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
                with self._faults:
                    self._explainer.returned(info, args, kwargs, output)
            if finished is not None:
                self._batch_ended(finished)
            if self._sync and output is not None:
                self._judging.raise_pending()
        finally:
            call_ends()

    def _skipped_root_ends(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """May raise OverflowDetected."""
        info = self._skipping.ends(module, output)
        if info is not None and self._explainer.keeps_roots:
            with self._faults:
                self._explainer.root_returned(info, args, kwargs)
                self._gradients.watch_skipped(info, output)
        if self._judging.pending is not None:
            with self._faults:
                self._explainer.returned(self._roots.enter(module)[0], args, kwargs, output)
            self._judging.raise_pending()

    def _batch_ended(self, root: RootInfo) -> None:
        """The root's forward has returned. Raises only OverflowDetected, or JobEnded for --abort-after-batch."""
        look_at_stack_file()
        if self._judging.pending is not None:
            self._judging.raise_pending()
        batch = self._progress.batch
        if self._last_batch is not None and root.id == self._skipping.first_root and batch >= self._last_batch:
            tell(f"gpuwatch: rank {self._progress.rank}: ending after batch {batch}: --abort-after-batch")
            raise JobEnded(0)

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
