"""All hooks of one rank: each part is made once, of the parts that it needs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..core.events.run_position import RunPosition
from ..core.frames import FramePhase
from ..core.judge import WarningLimits
from ..core.recorder.layout import NOTHING, HeadField, seal
from ..core.recorder.writer import RecorderWriter
from ..core.settings import WorkerSettings
from .answers import answer_in_python
from .compile.attach import CompiledRegions, apart_from_dynamo
from .device.device import without_modes
from .device.graph_replays import GraphReplays
from .explain.batch_source import BatchSources
from .explain.explained_batch import ExplainedBatch
from .explain.loss_look import LossLook
from .explain.packed_nodes import PackedNodes, follow_packed_nodes
from .explain.second_backward import SecondBackward
from .explain.second_look import SecondLook
from .explain.second_run import SecondRuns
from .hooks.backward import BackwardHooks
from .hooks.backward_calls import BackwardCalls
from .hooks.call_frames import CallFrames
from .hooks.compiled_policy import CompiledPolicy
from .hooks.data_loaders import DataLoaderHooks
from .hooks.global_hooks import GlobalHooks, RunningCalls, patch_exports
from .hooks.grad_scaler import GradScalerHooks
from .hooks.group_teardown import note_teardowns
from .hooks.module_calls import ModuleCalls
from .hooks.native_writer import called_by_native_hooks
from .hooks.optimizer import OptimizerHooks
from .hooks.process_groups import CollectivePatches
from .hooks.skipping import BatchSkipping
from .hooks.swapped_tensors import SwappedTensors
from .patches import allow_global_hooks
from .record.bad_elements import KeptSummands
from .record.frame_writer import FrameWriter
from .record.held_alarms import TrainedModules
from .record.judging import AlarmRecorder
from .record.late_masks import LateMasks
from .record.names import CALL, ModuleSelection
from .record.notable import NotableFilter
from .record.passed import LatePassed, PassedValues
from .record.progress import RunProgress
from .record.root_tensors import RootTensors
from .record.roots import RankRoots
from .record.rows import RowWriter
from .record.skipped_rows import SkippedRows


class ModuleHooks:
    """`attach()` registers the hooks, `detach()` removes every one of them."""

    def __init__(
        self, recorder: RecorderWriter, settings: WorkerSettings, rank: int, only: torch.nn.Module | None = None
    ) -> None:
        """`only`: the model that is watched; None: all are."""
        self._recorder = recorder
        self._watch = settings.watch
        selection = ModuleSelection(settings.modules, settings.ignore)
        notable = NotableFilter(WarningLimits(settings.near_overflow, settings.underflow_share))
        self.progress = progress = RunProgress(recorder, settings, rank)
        self._running = running = RunningCalls(progress)
        progress.faults.where = running.where
        fault, self._patches = progress.faults.record, progress.faults.patches
        # Lambdas stand for objects that are made further down. They are called once the hooks are attached.
        with_grads = "grads" in settings.watch
        self._roots = roots = RankRoots(
            recorder, selection, (lambda *parameter: gradients.watch_parameter(*parameter)) if with_grads else None
        )
        self.rows = rows = RowWriter(recorder, notable, fault, selection, running.where)
        masks = LateMasks(rows)
        summands = KeptSummands()
        passed = PassedValues(progress, summands)
        self._late_passed = late_passed = LatePassed(passed, rows, progress, masks)
        self._trained = TrainedModules(roots)
        self.judging = judging = AlarmRecorder(
            progress,
            rows,
            late_passed,
            masks,
            self._trained,
            has_run=lambda page: gradients.has_run(page),
            optimizer_of=lambda bad: steps.steps.optimizer_of(bad),
            on_bad_weight=lambda *weight: steps.steps.weight_is_bad(*weight),
            look_again=lambda bad: second_look.read(bad),
            on_first=lambda bad: self._sources.alarmed(bad),
            on_end=lambda bad: self.second_runs.expect(bad),
            conclude=lambda: self.second_runs.conclude(),
        )
        self.frames = frames = FrameWriter(progress, roots, rows, judging)
        kept = SkippedRows(frames)
        self._gradients = gradients = BackwardHooks(frames, kept)
        self._swapped = SwappedTensors(frames, gradients)
        self._skipping = skipping = BatchSkipping(frames, kept, only)
        policy = CompiledPolicy(running, skipping, frames)
        self._graphs = graphs = CompiledRegions(policy, frames, gradients)
        self._global = global_hooks = GlobalHooks(running, progress)
        self._steps = steps = OptimizerHooks(frames, gradients, graphs, global_hooks, summands, only is not None)
        self._scalers = scalers = GradScalerHooks(frames, gradients, steps)
        self._call_frames = call_frames = CallFrames(running, frames, gradients, graphs, policy)
        self._root_tensors = RootTensors(frames)
        look = LossLook(
            roots.is_read,
            lambda page: gradients.graphs.of(page),
            lambda step: roots.weights() if progress.step != step else None,
        )
        second_look = SecondLook(
            call_frames, steps.steps, scalers, self._root_tensors, summands, look, steps.loose_reader
        )
        explained = ExplainedBatch(frames, lambda page: [graph.calls for graph in gradients.graphs.of(page)], summands)
        again = SecondBackward(frames, gradients, second_look.gradient_of, running.gathers)
        self.second_runs = SecondRuns(
            frames, running, global_hooks, lambda: bool(policy.around), explained, again, look
        )
        self._backwards = BackwardCalls(
            frames, gradients, only is not None, self.second_runs.loss_is_bad, self.second_runs.loss_on_device
        )
        gradients.after_backward = self.second_runs.backward_ends
        self._loaders = DataLoaderHooks(progress.faults)
        self._sources = sources = BatchSources(progress, self._loaders)
        self._calls = ModuleCalls(call_frames, global_hooks, self.second_runs, sources, skipping, self._root_tensors)
        self._replays = GraphReplays(self._calls, call_frames)
        looks = "comms" in settings.watch
        recorder.fields[HeadField.PASSED_UNSEEN] = seal(not looks)
        self._collectives = CollectivePatches(
            progress.groups, fault, passed=passed if looks else None, late=late_passed, on_mesh=progress.note_mesh
        )

    # -- attach and detach --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register the global hooks. They fire for existing modules and for those made later."""
        calls, steps = self._calls, self._steps
        hooks: tuple[Callable[..., Any], ...] = (calls.before, calls.after, steps.before, steps.after)
        self._global.attach(*map(apart_from_dynamo, hooks))
        self._patches.at_undo(self._global.detach)
        if "grads" in self._watch:
            self._gradients.attach()
            self._patches.at_undo(self._gradients.detach)
            self._scalers.attach(self._patches)
            self._backwards.attach(self._patches)
            follow_packed_nodes(self._patches)
        if "forward" in self._watch:
            named: list[Callable[..., Any]] = [ModuleCalls.before, ModuleCalls.after]
            named += OptimizerHooks.before, OptimizerHooks.right_before, OptimizerHooks.after
            called = *map(apart_from_dynamo, named), *named, *called_by_native_hooks(self.progress, self.rows)
            inner = self._backwards.begins, self._backwards.record, PackedNodes.push, PackedNodes.pop
            alone: tuple[Callable[..., Any], ...] = (*called, *self._gradients.hooks, *inner, answer_in_python)
            self._graphs.attach(alone, around=(self._backwards.run,))
            self._patches.at_undo(self._graphs.detach)
        self._replays.attach(self._patches)
        self._loaders.attach(self._patches)
        self._collectives.attach()
        self._patches.at_undo(self._collectives.detach)
        note_teardowns(self._patches, self.progress.note_teardown)
        self._steps.attach(self._patches)
        patch_exports(self._global, self._patches)
        self._trained.attach(self._patches)
        self._swapped.attach(self._patches)
        allow_global_hooks()
        detach = weakref.WeakMethod(self.detach)  # in a DataLoader's worker: the recorder is its parent's
        os.register_at_fork(after_in_child=lambda: (method := detach()) and method())

    def detach(self) -> None:
        """Remove the hooks. The recording stays."""
        self._patches.undo()

    def close(self) -> None:
        """Remove the hooks and release the recorder's memory, so that it can be unmapped."""
        self.detach()
        self.second_runs.explained.ends()
        self.rows.close()

    # -- place in the run ---------------------------------------------------------------------------------------

    def where(self) -> RunPosition:
        """The place in the run, for an event."""
        return self._running.where()

    def raised_in(self, error: BaseException) -> str | None:
        """The name of the innermost module in the traceback of `error`; None if no module is in it."""
        module = None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is CALL:
                module = trace.tb_frame.f_locals.get("self")
            trace = trace.tb_next
        return self._roots.name_of(module) if module is not None else None

    def read_the_rest(self) -> None:
        """Read weights and states that no hook has read since the last batch. As OptimizerHooks does."""
        self._steps.read_the_rest()

    def settle(self) -> bool:
        """The script has ended: judge the numbers that have arrived since. True when no number is outstanding."""
        self.reinstall()
        self.second_runs.explained.ends()
        with self.progress.faults.within("process groups"):
            self.progress.groups.notice()
        with self.progress.lock:
            self._graphs.record()
            for root in self._roots.infos:
                self._graphs.batch_ends(root)
                if root.page is not None:
                    self.judging.forward_ends(root.page)
            self._recorder.pause_page()
            everything = self.judging.collect()
            everything &= self._late_passed.settle()
            everything &= self._root_tensors.settle()
            if everything:
                self.judging.held.script_ended()
        return self._scalers.collect() and everything

    def collect(self) -> bool:
        """Judge the numbers that have arrived. True when none is outstanding. Does not wait.

        Readings on a device since the last batch are sent to the host first: there may be no other batch.
        """
        with self.progress.lock:
            self.rows.flush()
            everything = self.judging.collect()
            return self._scalers.collect() and everything

    def reinstall(self) -> None:
        """Attach the hooks again if somebody cleared torch's global hooks; calls in between were not recorded."""
        self._global.reinstall()

    # -- tensors that the script names --------------------------------------------------------------------------

    def look_at(self, tensor: Any, name: str) -> None:
        """Record a tensor that the script names (`gpuwatch.detect_overflow`). May raise OverflowDetected."""
        if self._global.are_away:  # a second run, or `gpuwatch.explain`: no part of the training
            return
        with self.progress.faults.within("detect_overflow"), self.progress.lock:
            without_modes(self._record_named, tensor, name)
        self.judging.raise_pending()

    def _record_named(self, tensor: Any, name: str) -> None:
        stack = self._running.stack
        info = self._roots.place(name, stack[0].root if stack else None)
        if not stack:
            info.root.batches += 1
            self.rows.begin_page(self.progress.begin_page(info.root).batch)
        page = self._recorder.page
        if page is None:
            return
        row = self.rows.leaf(info, "output", tensor)
        parent = stack[-1].id if stack else NOTHING
        depth = self._running.depths[len(stack) - 1] + 1 if stack else 0
        self.frames.put(page, info, FramePhase.FORWARD, [row], parent=parent, depth=depth)
        if not stack:
            self._recorder.pause_page()
