"""The frame of a module call, where the native writer does not write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core.roles import role_of_parameter
from ...core.values import NonFinite
from ..compile.attach import CompiledRegions
from ..device.device import is_on_device, without_modes
from ..record.frame_writer import FrameReader, FrameWriter
from ..record.names import inputs_of, outputs_of
from ..record.recorded_row import RecordedRow, closed_marked
from ..record.roots import ModuleInfo
from .backward import BackwardHooks
from .compiled_policy import CompiledPolicy
from .global_hooks import RunningCalls

_NAN = int(NonFinite.NAN)


@dataclass(eq=False, repr=False)
class CallFrames:
    """Reads the arguments and results of a call, and its module's weights."""

    running: RunningCalls
    frames: FrameWriter
    gradients: BackwardHooks
    graphs: CompiledRegions
    policy: CompiledPolicy

    def __post_init__(self) -> None:
        self._progress, self._rows = self.frames.progress, self.frames.rows
        self._recorder = self._progress.recorder
        watch = self._progress.settings.watch
        self._forward, self._grads, self._weights = "forward" in watch, "grads" in watch, "weights" in watch

    def record(
        self,
        info: ModuleInfo,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
        raised: bool,
        reader: FrameReader,
    ) -> None:
        """Write the frame of the innermost call."""
        page = self._recorder.page
        if page is None:
            return
        rows, later = self._read_weights(info, module)
        if self._forward:
            weights = len(rows)
            self._rows.changed.clear()
            arguments = inputs_of(args, kwargs)
            for role, leaf in arguments:
                rows.append(reader.argument(info, role, leaf))
            if not raised:
                flags = 0
                returned = outputs_of(output)
                first = len(rows)
                for role, leaf in returned:
                    row = reader.leaf(info, role, leaf)
                    rows.append(row)
                    flags |= row.flags
                    # a tensor that an inner call has returned keeps the hook and the name of that call
                    if row.fresh and self._grads:
                        self.gradients.watch_output(info, role, leaf, page)
                # only after a bad output: this reads memory a second time
                if flags:
                    self._doubt(info, module, arguments, rows, weights, flags)
                if self._rows.changed:
                    self._put_before(info, arguments, returned, rows, first)
        # on a device the weights are read last, and stand first in the frame as in host memory
        rows[:0] = [self._rows.weight(info, role, parameter, self._progress.step) for role, parameter in later]
        running = self.running
        depth = running.depths[len(running.stack) - 1]
        self.frames.put(page, info, running.phase, rows, parent=running.parent(), depth=depth, entered=info.seq)

    def record_wrapper(
        self, info: ModuleInfo, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        """A wrapper has a frame of its own only if nothing inside it was recorded."""
        rootless = self._record_graphs_in(info, len(self.running.stack) - 1)
        page = self._recorder.page
        if page is not None and (rootless or info.entered == self._recorder.frame_count) and info.watched:
            without_modes(self.record, info, module, args, kwargs, output, raised, self.graphs)

    def record_graphs(self, position: int) -> bool:
        """Write the frames of the graphs that have run in a running call. False if it is known to run none."""
        info = self.running.stack[position]
        if info.cls not in self.policy.around:
            return False
        with self._progress.lock:
            self._record_graphs_in(info, position)
        return True

    def _record_graphs_in(self, info: ModuleInfo, position: int) -> bool:
        parent = self.running.parent() if info.is_wrapper else info.id
        depth = self.running.depths[position] + (not info.is_wrapper)
        return self.graphs.record(info, parent, depth, self.running.phase)

    def _read_weights(
        self, info: ModuleInfo, module: torch.nn.Module
    ) -> tuple[list[RecordedRow], list[tuple[str, torch.Tensor]]]:
        """The rows of weights in host memory, and the weights on a device, which are read after the other tensors."""
        rows: list[RecordedRow] = []
        later: list[tuple[str, torch.Tensor]] = []
        for name, parameter in module._parameters.items():
            if parameter is not None:
                role = role_of_parameter(name)
                # each time, as the script may unfreeze a parameter; a second call returns at once
                if self._grads and parameter.requires_grad:
                    self.gradients.watch_parameter(parameter, info, role)
                if self._weights and is_on_device(parameter):
                    later.append((role, parameter))
                elif self._weights:
                    rows.append(self._rows.weight(info, role, parameter, self._progress.step))
        return rows, later

    def _doubt(
        self,
        info: ModuleInfo,
        module: torch.nn.Module,
        arguments: list[tuple[str, Any]],
        rows: list[RecordedRow],
        weights: int,
        flags: int,
    ) -> None:
        """Read earlier finite tensors again after a bad output: they may have changed since.

        A collective writes into a tensor, and `tensor.data = ...` gives it other memory, without a new version.
        """
        if weights and not any(row.flags for row in rows[:weights]):
            names = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
            for position, (name, parameter) in enumerate(names):
                rows[position] = self._rows.weight_again(info, role_of_parameter(name), parameter, self._progress.step)
                if rows[position].flags:
                    break
        for position, (role, leaf) in enumerate(arguments, weights):
            # one that was read for this frame is as it was a moment ago: only an earlier reading can be out of date
            if not rows[position].fresh and not rows[position].flags and isinstance(leaf, torch.Tensor):
                again = self._rows.read_again(info, role, leaf)
                if again is not None:
                    rows[position] = again
            if flags & _NAN:
                rows[position] = closed_marked(rows[position], leaf)

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
            if id(leaf) in self._rows.changed and (row.flags or row.pending)
        }
        for role, leaf in arguments if unclear else ():
            if id(leaf) in unclear:
                rows.append(self._rows.before(info, role, leaf))
