"""Global hooks: a frame for every module call of an unmodified script, for its backward and for its optimizer.

The hooks only record. record/judging.py hands a frame to the judge once its numbers are there. Nothing here raises into
the training except the abort that the user asked for.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import torch

from ...core.errors import JobEnded
from ...core.events import (
    BadWeight,
    BatchInputs,
    CompiledUnseen,
    GraphNode,
    LookedAgain,
    NotLookedInto,
    OwnCodeModule,
    OwnFault,
    RunPosition,
)
from ...core.frames import Phase, RowMark, format_number, module_text
from ...core.judge import WarningLimits
from ...core.recorder.layout import NOTHING, HeadField, HooksState, RankPhase, seal
from ...core.recorder.writer import RecorderWriter
from ...core.roles import RoleKind, parse_role, role_of_parameter
from ...core.settings import WorkerSettings
from ...core.tell import tell
from ...core.torch_names import name_in_torch
from ...core.values import NonFinite, decode, name_of
from ..compile import traced_hooks as traced
from ..compile.apart import apart_from_dynamo
from ..compile.attach import CompiledRegions
from ..compile.kinds import RegionScope
from ..compile.views import CompiledViews
from ..record.alarm_frames import FrameWriter
from ..record.autograd_graph import GraphCalls, next_node
from ..record.closed_rows import LateMasks, closed_marked
from ..record.collectives import issued
from ..record.graph_sources import explaining_row, shown_in, sources_later, sources_now
from ..record.held_alarms import NonFiniteRow
from ..record.judging import AlarmRecorder
from ..record.late_passed import LatePassed
from ..record.leaves import inputs_of, outputs_of
from ..record.names import ModuleSelection, class_of, unwrap
from ..record.passed import PassedValues
from ..record.progress import CostMeter, RunProgress
from ..record.roots import ModuleInfo, RankRoots
from ..record.rows import RecordedRow, RowWriter
from ..record.trained import TrainedModules
from ..recursion import call_begins, call_ends, work_begins, work_ends
from ..stack_file import look_at_stack_file
from ..stats.device import is_on_device
from ..stats.notable import NotableFilter
from ..stats.tensor_stats import FLOATS, TensorStats, measure, version_of
from ..stats.without_modes import without_modes
from .backward import BackwardHooks
from .global_hooks import GlobalHooks
from .grad_scaler import GradScalerHooks
from .native_writer import called_by_native_hooks, native_writer_of
from .optimizer import OptimizerHooks
from .process_groups import CollectivePatches
from .second_look import BadOutput, batch_digest, graph_users, look_again
from .torch_export import ExportPatches

_MAX_FAULTS = 20
_MOST_CHANGED = 4
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference")
"""Functions of torch.distributed.pipelining that run a module only to learn its shapes."""


_is_compiling = torch.compiler.is_compiling
_is_tracing = name_in_torch("torch._C._is_tracing", lambda: False)
_graph_task = name_in_torch("torch._C._current_graph_task_id", lambda: -1)
_running_node = name_in_torch("torch._C._current_autograd_node", lambda: None)
_this_thread = threading.get_ident
_MODULE = int(HeadField.MODULE)
_LEFT_OUT = int(HeadField.CALLS_LEFT_OUT)
_SKIPPED = int(RowMark.SKIPPED)
_NAN = int(NonFinite.NAN)

_CALL = torch.nn.Module._call_impl.__code__
"""The code object of every module call. A stack frame with this code is a module call."""


class ModuleHooks:
    """The hooks of one rank. `attach()` registers them, `detach()` removes every one of them."""

    def __init__(
        self, recorder: RecorderWriter, settings: WorkerSettings, rank: int, only: torch.nn.Module | None = None
    ) -> None:
        self._recorder = recorder
        self._fields = recorder.fields
        self._settings = settings
        self._only = frozenset(map(id, only.modules())) if only is not None else None
        """Ids of the modules that may be roots; None: all."""
        self._watched_classes = {class_of(part) for part in only.modules()} if only is not None else set()
        self._stack: list[ModuleInfo] = []
        self._depths: list[int] = []
        """Of each call on the stack, how many calls are around it that are no wrapper's. It may be longer."""
        self._around_graphs: set[str] = set()
        """Classes of modules whose forward runs compiled regions."""
        self._not_looked_into: set[tuple[str, str, bool]] = set()
        """(module, class, whether a frame shows it) that run compiled code which no frame shows."""
        self._has_told_unseen = False
        self._thread = 0
        self._outer_exception: BaseException | None = None
        self._skipped_root: Any = None
        """Weak reference to the root of a skipped batch while it runs; None otherwise."""
        self._page_with_threads = -1
        """Number of the last page in whose forward modules were called in another thread."""
        self._infers_shapes = False
        """The skipped root runs for torch's shape inference and is not a batch."""
        self._phase = Phase.FORWARD
        self._calls: GraphCalls | None = None
        """The autograd nodes of the calls of the running root; None if no gradients are recorded."""
        self._first_root: int | None = None
        self._sharded: dict[int, bool] = {}
        """id of a root -> see `_is_sharded`."""
        self._faults = 0
        self._sync = settings.sync
        self._forward = "forward" in settings.watch
        self._grads = "grads" in settings.watch
        self._weights = "weights" in settings.watch
        selection = ModuleSelection(settings.modules, settings.ignore)
        self.progress = RunProgress(recorder, settings, rank)
        self._roots = RankRoots(recorder, selection)
        notable = NotableFilter(WarningLimits(settings.near_overflow, settings.underflow_share))
        self._lock = self.progress.lock
        self.rows = RowWriter(recorder, selection, notable, self._fault, self._lock)
        self.judging = AlarmRecorder(self.progress, self.rows)
        self.judging.look_again = self._look_again
        self.frames = FrameWriter(self.progress, self.judging)
        self._gradients = BackwardHooks(self.progress, self.rows, self.frames, self.judging, self._fault)
        self._trained = TrainedModules(self._roots)
        self.judging.hold_with(self._trained, self._gradients.has_run)
        self._steps = OptimizerHooks(
            self.progress, self.rows, self._roots, self.frames, self.judging, self._gradients, self._fault
        )
        self._steps.only = only is not None
        self._scalers = GradScalerHooks(self.progress, self.judging, self._gradients, self._steps, self._fault)
        hooks: tuple[Callable[..., Any], ...] = (self._before, self._after, self._before_step, self._steps.after)
        called = [apart_from_dynamo(hook) for hook in hooks]
        self._graphs = CompiledRegions(
            self._resolve,
            self._may_open_region,
            lambda: self._stack[-1].ref() if self._stack else None,
            self._note_not_looked_into,
            self._may_not_open_region,
            self._note_unseen,
            self.progress,
            self._roots,
            self.rows,
            self.frames,
            self._gradients,
            self._fault,
            (*called, *hooks, *self._gradients.hooks, *called_by_native_hooks(self.progress, self.rows)),
        )
        self.writer = self._gradients.writer = native_writer_of(self.progress, self.rows, self._gradients)
        self._steps.writer = self.writer
        passed = PassedValues(self.progress, self.progress.groups)
        looks = "comms" in settings.watch
        self._fields[HeadField.PASSED_UNSEEN] = seal(not looks)
        self._masks = LateMasks(self.rows)
        self.judging.learn_masks = self._masks.learn
        self._late_passed = LatePassed(passed, self.rows, self.progress.groups, self._lock, self._fault, self._masks)
        self.judging.collect_passed = self._late_passed.collect
        self._collectives = CollectivePatches(
            self.progress.groups, self._fault, passed=passed if looks else None, late=self._late_passed
        )
        self._global = GlobalHooks(*called)
        self._exports = ExportPatches(lambda: self._global.handles)
        self._cost = CostMeter() if settings.measure_cost else None
        if self._grads:
            self._roots.on_parameter = self._gradients.watch_parameter

    # -- attach and detach --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register the global hooks. They fire for existing modules and for those made later."""
        self._global.attach()
        if self._grads:
            self._gradients.attach()
            self._scalers.attach()
        if self._forward:
            self._graphs.attach()
        self._collectives.attach()
        self._steps.of_rpc.attach()
        self._exports.attach()
        self._trained.attach()
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        detach = weakref.WeakMethod(self.detach)  # in a DataLoader's worker: the recorder is its parent's
        os.register_at_fork(after_in_child=lambda: (method := detach()) and method())

    def detach(self) -> None:
        """Remove the hooks. The recording stays."""
        self._global.detach()
        self._gradients.detach()
        self._steps.detach()
        self._scalers.detach()
        self._graphs.detach()
        self._collectives.detach()
        self._steps.of_rpc.detach()
        self._exports.detach()
        self._trained.detach()

    def close(self) -> None:
        """Remove the hooks and release the recorder's memory, so that it can be unmapped."""
        self.detach()
        self.rows.close()

    # -- place in the run ---------------------------------------------------------------------------------------

    def where(self) -> RunPosition:
        """The place in the run, for an event."""
        return self.progress.where(root=self._stack[0].root.label if self._stack else None)

    def raised_in(self, error: BaseException) -> str | None:
        """The name of the innermost module in the traceback of `error`; None if no module is in it."""
        module = None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is _CALL:
                module = trace.tb_frame.f_locals.get("self")
            trace = trace.tb_next
        return self._roots.name_of(module) if module is not None else None

    def settle(self) -> bool:
        """The script has ended: judge the numbers that have arrived since. True when no number is outstanding."""
        self.put_back()
        try:
            self.progress.groups.notice()
        except Exception as error:
            self._fault("process groups", error)
        with self._lock:
            self._graphs.take()
            for root in self._roots.infos():
                self._graphs.batch_ends(root)
                if root.page is not None:
                    self.judging.forward_ends(root.page)
            self._recorder.pause_page()
            if self._cost is not None:
                cost = self._cost.result(self.progress.where())
                if cost is not None:
                    self._recorder.append(cost)
                    self._cost = None
            everything = self.judging.collect()
            everything &= self._late_passed.settle()
            if everything and self.judging.held is not None:
                self.judging.held.script_ended()
        return self._scalers.collect() and everything

    def collect(self) -> bool:
        """Judge what has arrived of what was recorded so far. True when no number is outstanding. Does not wait.

        What was read on a device since the last batch is sent off first: no other batch may come.
        """
        with self._lock:
            self.rows.flush()
            everything = self.judging.collect()
            return self._scalers.collect() and everything

    def put_back(self) -> None:
        """Somebody may have cleared torch's global hooks: what ran since the last look was not recorded."""
        if self._global.put_back():
            if self._stack and not self._still_running():
                self._stack.clear()  # its forward has returned without our hook
            fields = self._fields
            if not fields[HeadField.HOOKS_GONE]:
                fields[HeadField.GONE_PAGE] = fields[HeadField.PAGE]
            fields[HeadField.HOOKS_GONE] += 1

    # -- the hooks ----------------------------------------------------------------------------------------------

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if _is_compiling():
            if torch.compiler.is_dynamo_compiling() and traced.before is not None:
                traced.before(module)
            return
        call_begins()
        try:
            if self._skipped_root is not None and self._stays_skipped(module):
                if self._around_graphs and class_of(module) in self._around_graphs:
                    self._skip_graphs()
                return
            if _is_tracing():
                return
            try:
                self._enter(module)
            except Exception as error:
                self._fault("forward pre-hook", error)
            if self.judging.pending is not None and len(self._stack) == 1:
                self.judging.raise_pending()
        finally:
            work_ends()

    def _after(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        # `rest` is (kwargs, output). When the forward raised, torch (up to at least 2.13) omits kwargs in a global hook
        if _is_compiling():
            if torch.compiler.is_dynamo_compiling() and traced.after is not None:
                if len(rest) == 2:
                    traced.after(module, args, rest[0], rest[1])
                else:
                    traced.after(module, args, {}, rest[0])
            return
        work_begins()
        try:
            if self._skipped_root is not None:
                if self._skipped_root() is module:
                    self._leave_skipped(module, args, *rest)
                return
            if not self._stack or _is_tracing():
                return
            kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
            finished = False
            try:
                finished = self._leave(module, args, kwargs, output)
            except Exception as error:
                self._fault("forward hook", error)
                return
            if finished:
                self._batch_ended()
            if self._sync and output is not None:
                self._judge_now()
        finally:
            call_ends()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_compiling():
            return None
        try:
            self.put_back()
            with self._lock:
                self._graphs.take()
                self.judging.collect()
                self._gradients.let_go()
        except Exception as error:
            self._fault("before the optimizer step", error)
        return self._steps.before(optimizer, args, kwargs)

    # -- skipped batches ----------------------------------------------------------------------------------------

    def _stays_skipped(self, module: torch.nn.Module) -> bool:
        """Whether `module` is called inside the skipped root.

        It is not if an interrupt ended that root's forward without its hook.
        """
        root = self._skipped_root()
        if root is not None and root is not module:
            return True
        self._skipped_root = None
        return False

    def _leave_skipped(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """Record the output of a skipped batch, and nothing else of it."""
        self._skipped_root = None
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        inferred_shapes, self._infers_shapes = self._infers_shapes, False
        if output is None or inferred_shapes or self._cost is not None:
            return
        try:
            with self._lock:
                without_modes(self._record_skipped, module, args, kwargs, output)
        except Exception as error:
            self._fault("forward hook", error)
        self.judging.raise_pending()

    def _record_skipped(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Write a frame of the root's output, unless all of it is known to be finite."""
        info, _ = self._roots.enter(module)
        page = None
        rows: list[RecordedRow] = []
        for role, leaf in outputs_of(output):
            if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            if page is None:
                page = self.progress.begin_page(info.root)
                self.rows.begin_page(page.batch)
            rows.append(self.rows.leaf(info, role, leaf, _SKIPPED))
        if page is not None and any(row.flags or row.pending for row in rows):
            self.frames.put(page, info, Phase.FORWARD, rows)
        self._recorder.pause_page()

    def _skip_graphs(self) -> None:
        try:
            with self._lock:
                self._graphs.skip()
        except Exception as error:
            self._fault("forward pre-hook", error)

    def _skips(self, batch: int) -> bool:
        if batch in self._settings.trace_batches:
            return False
        if self._cost is not None:
            return batch % 2 == 1
        return batch % self._settings.every != 0

    # -- before a module's forward ------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module) -> None:
        stack = self._stack
        info = stack[0].root.modules.get(id(module)) if stack else None
        if info is None or info is stack[0] or info.guessed or info.ref() is not module:
            if stack and not self._still_running():
                stack.clear()  # an interrupt ended the last forward without its hooks
            if not stack:
                with self._lock:
                    info = self._enter_root(module)
            elif _this_thread() == self._thread:
                info = self._roots.child(module, stack[0].root, stack[-1])
            else:
                self._leave_out_thread()
                info = None
            if info is None:
                return
        elif _this_thread() != self._thread:
            self._leave_out_thread()
            return
        if self._around_graphs and stack and not info.is_graph:
            self._take_graphs(len(stack) - 1)
        if info.cls in self._around_graphs:
            self._graphs.discard()
        info.seq = issued()
        info.first_node = next_node()
        if info.is_wrapper:
            info.entered = self._recorder.frame_count
        position = len(stack)
        if position == len(self._depths):
            self._depths.append(0)
        if position:
            self._depths[position] = self._depths[position - 1] + (not stack[position - 1].is_wrapper)
        stack.append(info)
        self._fields[_MODULE] = info.id

    def _take_graphs(self, position: int) -> bool:
        """Write the frames of the graphs that have run in a running call. False if it is known to run none."""
        info = self._stack[position]
        if info.cls not in self._around_graphs:
            return False
        with self._lock:
            self._take_graphs_in(info, position)
        return True

    def _take_graphs_in(self, info: ModuleInfo, position: int) -> bool:
        parent = self._parent() if info.is_wrapper else info.id
        depth = self._depths[position] + (not info.is_wrapper)
        return self._graphs.take(info, parent, depth, self._phase)

    def _still_running(self) -> bool:
        """Whether the innermost call on our stack is still on its thread's stack. Slow, and rarely needed."""
        innermost = self._stack[-1].ref()
        frame: FrameType | None = sys._current_frames().get(self._thread)
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals.get("self") is innermost:
                return True
            frame = frame.f_back
        return False

    def _enter_root(self, module: torch.nn.Module) -> ModuleInfo | None:
        """A module is called while no other one runs. None if this batch is skipped or the module is not watched."""
        progress = self.progress
        if self._only is not None and id(unwrap(module)) not in self._only:
            return None  # it may contain the watched model, as a loss module does
        if isinstance(module, torch.fx.GraphModule) and _is_called_from("torch._functorch."):
            return None  # torch.compile made it, of what is recorded as a graph
        if _is_shape_inference():
            self._skipped_root, self._infers_shapes = weakref.ref(module), True
            return None
        self.put_back()
        info, opens_batch = self._roots.enter(module)
        root = info.root
        if root.page is not None and _graph_task() != -1:
            if progress.skipped:
                self._skipped_root = weakref.ref(module)
                return None
            page = self._gradients.page_of(root) or root.page
            progress.resume(page)
            self.rows.begin_page(page.batch)
            self._phase = Phase.RECOMPUTE
        else:
            self._graphs.take()
            self._graphs.batch_ends(root)
            if root.page is not None:
                self.judging.forward_ends(root.page)  # an interrupt may have ended it without its hooks
            self.judging.collect()
            if self.judging.held is not None and root.page is not None:
                self.judging.held.batch_ended(root.page)
            self._gradients.batch_begins()
            if self._first_root is None:
                self._first_root = root.id
            if opens_batch:
                root.batches += 1
                if self._cost is not None and root.id == self._first_root:
                    self._cost.batch_begins(self._skips(root.batches - 1))
            progress.skipped = self._skips(max(0, root.batches - 1))
            if progress.skipped:
                self._skipped_root = weakref.ref(module)
                if opens_batch:
                    self._fields[HeadField.BATCHES_SKIPPED] += 1
                    self._fields[HeadField.BATCH] = root.batches - 1
                return None
            page = progress.begin_page(root)
            self.rows.begin_page(page.batch)
            self._phase = Phase.FORWARD
            progress.times.forward_begins()
        self._calls = GraphCalls(page.number) if self._grads and torch.is_grad_enabled() else None
        self._thread = _this_thread()
        self._outer_exception = sys.exc_info()[1]
        progress.enter(RankPhase.FORWARD)
        return info

    def _leave_out_thread(self) -> None:
        """A call in a second thread within one forward: it has no order relative to the first thread's calls."""
        page, fields = self._recorder.page, self._fields
        self._page_with_threads = page.number if page is not None else -1
        if not fields[_LEFT_OUT]:
            fields[HeadField.LEFT_OUT_PAGE] = self._page_with_threads
        fields[_LEFT_OUT] += 1

    # -- after a module's forward -------------------------------------------------------------------------------

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """Record the frame; True when it was the root's."""
        stack = self._stack
        if _this_thread() != self._thread:
            return False
        info = stack[-1]
        while info.ref() is not module:
            if not any(entered.ref() is module for entered in stack):
                return False  # entered before the hooks were attached
            stack.pop()
            info = stack[-1]
        raised = output is None and sys.exc_info()[1] not in (None, self._outer_exception)
        if self._calls is not None:
            self._calls.calls.append((info, info.first_node, next_node()))
        writer, page = self.writer, self._recorder.page
        position = len(stack) - 1
        shards = self.rows.device_buffer is not None and self._is_sharded(stack[0])
        if self.rows.device_buffer is not None and not shards and self.rows.may_have_changed():
            without_modes(self.rows.forget_changed_arguments, args, kwargs)
        try:
            has_graphs = bool(self._around_graphs) and self._take_graphs(position)
            if info.is_wrapper:
                with self._lock:
                    self._leave_wrapper(info, module, args, kwargs, output, raised)
            elif info.watched:
                caller = stack[position - 1]
                parent = self._parent() if caller.is_wrapper or not position else caller.id
                if (
                    writer is None
                    or has_graphs
                    or output is None
                    or page is None
                    or not writer.frame(
                        info,
                        module,
                        args,
                        kwargs,
                        output,
                        page,
                        parent,
                        self._depths[position],
                        self._phase,
                        self.progress.step,
                    )
                ):
                    with self._lock:
                        reader = self._graphs if has_graphs else self.rows
                        without_modes(self._take_frame, info, module, args, kwargs, output, raised, reader)
            if self._masks.slots and page is not None and not raised:
                with self._lock:
                    self._masks.look(info, page, args, kwargs)
            if shards:
                with self._lock:
                    self.rows.read_waiting()
        finally:
            stack.pop()
        fields = self._fields
        if stack:
            fields[_MODULE] = stack[-1].id
            return False
        self.put_back()
        with self._lock:
            self._graphs.take()
            page = self._recorder.page
            self._recorder.pause_page()
            self.rows.flush()
            if page is not None:
                self.judging.forward_ends(page)
            self.judging.collect()
            self._gradients.let_go()
            is_first = page is not None and page.number == self.judging.first_alarmed
            if is_first and self._phase is Phase.FORWARD and not raised:
                self._record_inputs(args, kwargs)
            if self._calls is not None and not raised:
                without_modes(self._gradients.watch_graph, self._calls, output)
            self._calls = None
        self.progress.enter(RankPhase.BACKWARD if self._phase is Phase.RECOMPUTE else RankPhase.SCRIPT)
        fields[HeadField.SEQ] = issued()
        if raised or self._phase is Phase.RECOMPUTE:
            return False
        self.progress.times.forward_ends()
        self._last_root = info.root
        return True

    def _record_inputs(self, args: Any, kwargs: Any) -> None:
        """Something was bad in this forward, for the first time: record what the model was handed."""
        digests = without_modes(batch_digest, inputs_of(args, kwargs))
        if digests:
            self._recorder.append(BatchInputs(self.where(), digests))

    def _leave_wrapper(
        self, info: ModuleInfo, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        """A wrapper has a frame of its own only if nothing inside it was recorded."""
        rootless = self._take_graphs_in(info, len(self._stack) - 1)
        page = self._recorder.page
        if page is not None and (rootless or info.entered == self._recorder.frame_count) and info.watched:
            without_modes(self._take_frame, info, module, args, kwargs, output, raised, self._graphs)

    def _take_frame(
        self,
        info: ModuleInfo,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
        raised: bool,
        reader: RowWriter | CompiledRegions,
    ) -> None:
        page = self._recorder.page
        if page is None:
            return
        rows: list[RecordedRow] = []
        later: list[tuple[str, torch.Tensor]] = []
        for name, parameter in module._parameters.items():
            if parameter is not None:
                role = role_of_parameter(name)
                if self._grads and parameter.requires_grad:
                    self._gradients.watch_parameter(parameter, info, role)
                if self._weights and is_on_device(parameter):
                    later.append((role, parameter))  # whether it is read again depends on the other rows
                elif self._weights:
                    rows.append(self.rows.weight(info, role, parameter, self.progress.step))
        weights = len(rows)
        if self._forward:
            self.rows.changed.clear()
            arguments = inputs_of(args, kwargs)
            for role, leaf in arguments:
                rows.append(reader.argument(info, role, leaf))
            if not raised:
                returned = outputs_of(output)
                first = len(rows)
                for role, leaf in returned:
                    row = reader.leaf(info, role, leaf)
                    rows.append(row)
                    if row.fresh and self._grads:
                        self._gradients.watch_output(info, role, leaf, page)
                if any(row.flags for row in rows[first:]):
                    if weights:
                        self._read_weights_again(info, module, rows, weights)
                    self._read_arguments_again(info, arguments, rows, weights)
                if any(row.flags & _NAN for row in rows[first:]):
                    for position, (_, leaf) in enumerate(arguments, weights):
                        rows[position] = closed_marked(rows[position], leaf)
                if self.rows.changed:
                    self._put_before(info, arguments, returned, rows, first)
        rows[:0] = [self.rows.weight(info, role, parameter, self.progress.step) for role, parameter in later]
        self.frames.put(
            page,
            info,
            self._phase,
            rows,
            parent=self._parent(),
            depth=self._depths[len(self._stack) - 1],
            entered=info.seq,
        )

    def _read_weights_again(
        self, info: ModuleInfo, module: torch.nn.Module, rows: list[RecordedRow], weights: int
    ) -> None:
        """The output is non-finite: read the weights again, since something else may have changed them."""
        if any(row.flags for row in rows[:weights]):
            return
        names = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
        for position, (name, parameter) in enumerate(names):
            rows[position] = self.rows.weight_again(info, role_of_parameter(name), parameter, self.progress.step)
            if rows[position].flags:
                break

    def _look_again(self, bad: NonFiniteRow) -> LookedAgain | None:
        """A second look at the module of the first alarm; None if it is no module, or is gone and nothing is left."""
        root, module = self._roots.find(bad.page.root, bad.frame.module, bad.frame.cls)
        graph = without_modes(self._graph_of, bad)
        if module is None:  # the script has ended, and the numbers came after that
            return LookedAgain(same_step=False, graph=graph) if graph else None
        self._late_passed.collect()  # what was read in that call is there, too
        found = look_again(root, module)
        last = self._steps.steps.last()
        same_step = self.progress.step == bad.page.step
        changed, bad_weight = without_modes(self._changed_weights, bad) if same_step else ([], None)
        role, own_code = without_modes(self._own_code_of, bad, module)
        return msgspec.structs.replace(
            found,
            optimizer=last,
            changed=changed,
            same_step=same_step,
            graph=graph,
            loss_scale=self._scalers.scale_in_use(),
            bad_weight=bad_weight,
            threads=self._page_with_threads == bad.page.number,
            own_code=own_code,
            own_code_of=role,
            left=self._was_left(bad),
            closed=self._masks.closed_in(bad.page.number, bad.frame.module),
            without_graph=not bad.page.with_gradients and not type(module).__module__.startswith("torch."),
        )

    def _was_left(self, bad: NonFiniteRow) -> bool:
        """Whether a parameter's bad gradient was not finite before the backward began."""
        parameter = self._parameter_of(bad) if bad.frame.phase in ("backward", "collective") else None
        return parameter is not None and self._gradients.left.was_bad(parameter, bad.page.number)

    def _parameter_of(self, bad: NonFiniteRow) -> torch.Tensor | None:
        """The parameter that a row of a gradient is about; None if it is about none."""
        role = parse_role(bad.row.role)
        owned = ((held(), info, name) for held, info, name in list(self._roots.parameters.values()))
        place = (bad.page.root, bad.frame.module, bad.frame.cls, role.name)
        return next((each for each, info, name in owned if (info.root.id, info.name, info.cls, name) == place), None)

    def _own_code_of(self, bad: NonFiniteRow, module: torch.nn.Module) -> tuple[str, list[OwnCodeModule]]:
        """(role, whose own code lies behind it) of the value that explains an alarm of a forward."""
        page, frame = bad.page, bad.frame
        row = explaining_row(frame)
        # compiled code is one node, and the nodes of another thread have numbers of their own
        if row is None or frame.phase != "forward" or self._around_graphs or self._page_with_threads == page.number:
            return "", []
        shown = shown_in(self.judging.frames_of(page))
        if self._calls is not None and self._calls.page == page.number:
            return row.role, sources_now(row, frame.module, module, _AFTER, self._calls, self._stack, shown)
        known = (*self._gradients.graphs, *self._gradients.held)
        graph = next((graph for graph in known if graph.calls.page == page.number and graph.within is None), None)
        return row.role, sources_later(row, frame.module, graph, shown) if graph is not None else []

    def _graph_of(self, bad: NonFiniteRow) -> list[GraphNode]:
        """What has used the tensor whose gradient is bad; empty for other rows, and where it is not known."""
        if bad.frame.phase != "backward":
            return []
        known = (*self._gradients.graphs, *self._gradients.held)
        graphs = [graph for graph in known if graph.calls.page == bad.page.number]
        named = (bad.frame.module, bad.frame.cls)
        number = next((i.id for graph in graphs for i, _, _ in graph.calls.calls if (i.name, i.cls) == named), None)
        if number is None:
            return []
        role = parse_role(bad.row.role)
        if role.kind is RoleKind.GRAD_OUTPUT:
            shape = tuple(bad.row.shape) if bad.row.shape is not None else None
            is_late = self.rows.device_buffer is not None and not self._sync
            maker = _running_node() if not is_late else None
            return graph_users(graphs, BadOutput(number, shape, "[" not in role.name, maker))
        parameter = self._parameter_of(bad)
        return graph_users(graphs, parameter) if parameter is not None else []

    def _changed_weights(self, bad: NonFiniteRow) -> tuple[list[str], BadWeight | None]:
        """Weights that are not what they were when they were last read, the first few of them, and the first of those
        that is not finite. Waits for a device."""
        found: list[str] = []
        worst: BadWeight | None = None
        shown = self.judging.weights_up_to(bad.page, bad.frame.index) if self.rows.device_buffer is not None else {}
        for reference, info, role in list(self._roots.parameters.values()):
            parameter = reference()
            known = self.rows.weights.get(id(parameter))
            if info.root.id != bad.page.root or parameter is None or known is None or known[0]() is not parameter:
                continue
            _, version, step, numbers = known
            then = _extremes(numbers) if isinstance(numbers, TensorStats) else shown.get((info.name, role))
            if then is None or len(found) == _MOST_CHANGED or parameter.dtype not in FLOATS:
                continue
            if (version, step) != (version_of(parameter), self.progress.step):  # a step that nobody looked at
                continue
            now = _extremes(measure(parameter))
            if now != then:
                before, after = (_largest(extremes) for extremes in (then, now))
                found.append(f"{role} of {module_text(info.name, info.cls)}, abs max {before} then, {after} now")
                if worst is None and now[2]:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    worst = BadWeight(info.name, info.cls, role, name_of(NonFinite(now[2])), dtype)
        return found, worst

    def _read_arguments_again(
        self, info: ModuleInfo, arguments: list[tuple[str, Any]], rows: list[RecordedRow], weights: int
    ) -> None:
        """Something bad came out: read again the arguments that were finite when they were last read.

        A collective writes into a tensor, and `tensor.data = ...` gives it other memory, without a new version.
        """
        for position, (role, leaf) in enumerate(arguments, weights):
            if not rows[position].fresh and not rows[position].flags and isinstance(leaf, torch.Tensor):
                again = self.rows.read_again(info, role, leaf)
                if again is not None:
                    rows[position] = again

    def _put_before(
        self,
        info: ModuleInfo,
        arguments: list[tuple[str, Any]],
        returned: list[tuple[str, Any]],
        rows: list[RecordedRow],
        first: int,
    ) -> None:
        """Add the earlier numbers of each argument that the call changed in place and returned.

        Arguments that are now known to be finite need none.
        """
        unclear = {
            id(leaf)
            for (_, leaf), row in zip(returned, rows[first:], strict=True)
            if id(leaf) in self.rows.changed and (row.flags or row.pending)
        }
        for role, leaf in arguments if unclear else ():
            if id(leaf) in unclear:
                rows.append(self.rows.before(info, role, leaf))

    def _is_sharded(self, root: ModuleInfo) -> bool:
        """Whether FSDP gathers weights between the calls of this root. Those collectives write into no argument."""
        known = self._sharded.get(root.root.id)
        if known is None:
            module = root.ref()
            classes = {
                cls.__name__ for part in (module.modules() if module is not None else ()) for cls in type(part).__mro__
            }
            known = self._sharded[root.root.id] = bool(classes & {"FSDPModule", "FullyShardedDataParallel"})
        return known

    def _parent(self) -> int:
        """The id of the module whose code made this call: the nearest one on the stack that is not a wrapper."""
        stack = self._stack
        for position in range(len(stack) - 2, -1, -1):
            if not stack[position].is_wrapper:
                return stack[position].id
        return NOTHING

    # -- compiled regions ---------------------------------------------------------------------------------------

    def _may_open_region(self, first: torch.nn.Module, known: bool, owner: torch.nn.Module | None) -> RegionScope:
        """Whether a compiled region is recorded: its `owner` is running, or no module outside of it is.

        `first` is the first module in it, and `owner` the one whose method is compiled. Others of its class may share
        the graph: the one that runs is the one whose graph it is. Wrappers do not count. `known`: a graph of this class
        is recorded already. The numbers of two that nothing outside tells apart could not be told apart.
        """
        cls = class_of(first)
        skipped = self._skipped_root() if self._skipped_root is not None else None
        inner = self._stack[-1] if self._stack else None
        if skipped is None and inner is None and self._only is not None and not self._only & {id(first), id(owner)}:
            if cls in self._watched_classes:  # those that are watched will share it
                self._note_not_looked_into(None, cls)
            return RegionScope.NO
        if skipped is None:
            if inner is not None and owner is not None and inner.ref() is owner:
                self._around_graphs.add(inner.cls)
                return RegionScope.BY_OWNER
            if not known and all(info.is_wrapper for info in self._stack):
                return RegionScope.ALONE if self._stack else RegionScope.UNSEEN
        self._may_not_open_region(cls)
        return RegionScope.NO

    def _may_not_open_region(self, cls: str) -> None:
        """A compiled region is not recorded. Its first module is of this class."""
        if self._stack or self._skipped_root is None or self._skipped_root() is None:
            self._note_not_looked_into(self._stack[-1] if self._stack else None, cls)
        else:
            self._note_place(("", cls, True))

    def _note_unseen(self, views: CompiledViews) -> None:
        """This torch does not let us see all of a graph."""
        if not self._has_told_unseen:
            self._has_told_unseen = True
            self._recorder.append(CompiledUnseen(self.where(), views.missing, not views.rows))
            if self.progress.rank == 0:
                tell(f"gpuwatch: {views.missing}")

    def _note_not_looked_into(self, info: ModuleInfo | None, cls: str) -> None:
        """Compiled code was not looked into: inside of this module, or, where none is known, of this class."""
        self._note_place((info.name, info.cls, True) if info is not None else ("", cls, False))

    def _note_place(self, place: tuple[str, str, bool]) -> None:
        if place not in self._not_looked_into:
            self._not_looked_into.add(place)
            self._recorder.append(NotLookedInto(self.where(), *place))

    def _resolve(self, module: torch.nn.Module, region: Any) -> ModuleInfo:
        """The info of a module that is being traced."""
        if self._stack:
            return self._roots.child(module, self._stack[0].root, self._stack[-1])
        if region is not None:
            return self._roots.child(module, region.root.root, region.stack[-1] if region.stack else region.root)
        return self._roots.enter(module)[0]

    # -- tensors that the script names, and the abort -----------------------------------------------------------

    def look_at(self, tensor: Any, name: str) -> None:
        """Record a tensor that the script names (`gpuwatch.detect_overflow`). May raise OverflowDetected."""
        try:
            with self._lock:
                without_modes(self._record_named, tensor, name)
        except Exception as error:
            self._fault("detect_overflow", error)
        self.judging.raise_pending()

    def _record_named(self, tensor: Any, name: str) -> None:
        info = self._roots.place(name, self._stack[0].root if self._stack else None)
        inside = bool(self._stack)
        if not inside:
            info.root.batches += 1
            self.rows.begin_page(self.progress.begin_page(info.root).batch)
        page = self._recorder.page
        if page is None:
            return
        row = self.rows.leaf(info, "output", tensor)
        parent = self._stack[-1].id if inside else NOTHING
        depth = self._depths[len(self._stack) - 1] + 1 if inside else 0
        self.frames.put(page, info, Phase.FORWARD, [row], parent=parent, depth=depth)
        if not inside:
            self._recorder.pause_page()

    def _judge_now(self) -> None:
        """`--sync`: wait for the numbers of the call that just returned. May raise OverflowDetected."""
        try:
            self.judging.finish()
        except Exception as error:
            self._fault("forward hook", error)
        self.judging.raise_pending()

    def _batch_ended(self) -> None:
        """The root's forward has returned. Raises only OverflowDetected, or JobEnded for --abort-after-batch."""
        look_at_stack_file()
        if self.judging.pending is not None:
            self.judging.raise_pending()
        last = self._settings.abort_after_batch
        if last is not None and self._last_root.id == self._first_root and self.progress.batch >= last:
            batch = self.progress.batch
            tell(f"gpuwatch: rank {self.progress.rank}: ending after batch {batch}: --abort-after-batch")
            raise JobEnded(0)

    def _fault(self, part: str, error: Exception) -> None:
        """Record an error of gpuwatch itself. The training goes on. `_MAX_FAULTS` errors remove the hooks."""
        self._faults += 1
        try:
            if self._faults <= _MAX_FAULTS:
                self._record_fault(part, error)
            else:
                self._recorder.count_fault(part)
            if self._faults == _MAX_FAULTS:
                self._fields[HeadField.HOOKS] = HooksState.DETACHED
        except Exception:  # the recorder is closed
            pass
        if self._faults == _MAX_FAULTS:
            self.detach()

    def _record_fault(self, part: str, error: Exception) -> None:
        try:
            fault = OwnFault(self.where(), part, f"{type(error).__name__}: {error}")
        except Exception:
            self._recorder.count_fault(part)
        else:
            self._recorder.append(fault)


_AFTER = ModuleHooks._after.__code__


def _extremes(numbers: TensorStats) -> tuple[float | None, float | None, int]:
    """(abs min, abs max, flags) of a tensor; None for nan, so that two of them can be compared."""
    encoding = numbers.meta >> 8 & 0xFF
    low, high = (decode(bits, encoding) for bits in (numbers.low, numbers.high))
    return None if math.isnan(low) else low, None if math.isnan(high) else high, numbers.meta & 0xFF


def _largest(extremes: tuple[float | None, float | None, int]) -> str:
    """`1.00e+38`, or `nan`."""
    _, largest, flags = extremes
    return format_number(largest).strip() if largest is not None else name_of(NonFinite(flags))


def _is_shape_inference() -> bool:
    """Whether torch.distributed.pipelining (2.13) runs this forward to infer shapes, on uninitialized memory.

    It does so for a pipeline stage whose input shapes were not given.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    return _is_called_from("torch.distributed.", _SHAPE_INFERENCE)


def _is_called_from(package: str, functions: tuple[str, ...] = ()) -> bool:
    """Whether a function of this package is running, one of `functions` if any are given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_one = not functions or frame.f_code.co_name in functions
        if is_one and frame.f_globals.get("__name__", "").startswith(package):
            return True
        frame = frame.f_back
    return False
