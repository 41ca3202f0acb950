"""The frames of gradients: what each hook of a backward records, of a module's output or of a parameter.

Autograd calls these functions; hooks/backward.py has the hooks put in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ...core.frames import FramePhase, RowMark
from ...core.recorder.layout import RankPhase
from ...core.recorder.writer import OpenPage
from ...core.signal_errors import from_outside
from ..device.device import without_modes
from ..record.frame_writer import FrameWriter
from ..record.plain_tensor import version_of
from ..record.recorded_row import RecordedRow
from ..record.roots import ModuleInfo, RootInfo
from ..record.skipped_rows import SkippedRows
from .accumulated_gradients import AccumulatedGradients, GradientFate, fate_of, gradient_of

_is_compiling = torch.compiler.is_compiling


class GradientFrames:
    """The part of BackwardHooks that writes the frame of each gradient."""

    def __init__(self, frames: FrameWriter, kept: SkippedRows) -> None:
        self._frames, self._kept = frames, kept
        self._progress = progress = frames.progress
        self._rows, self._judging = frames.rows, frames.judging
        self._fault, self._faults = progress.faults.record, progress.faults.within("parameter hook")
        self._sync = progress.settings.sync
        self._attached = False
        self._accumulated = AccumulatedGradients()
        self.local: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """id of a gradient -> (weak reference, version when it was recorded)."""
        self._page: OpenPage | None = None
        """The page of the running backward."""
        self.scaled = False
        """A GradScaler checks the gradients of this backward."""
        self.current: torch.Tensor | None = None
        """The gradient whose frame is being written."""
        self.before_parameter: Callable[[ModuleInfo], None] | None = None
        """Called with the module before a parameter's gradient is recorded: writes a compiled backward's frames."""

    def of_output(self, info: ModuleInfo, role: str, page: OpenPage, gradient: torch.Tensor | None) -> None:
        """Record the gradient of a module's output. It is None if only other outputs of the operation have one."""
        # a graph may keep our hook for longer than we watch
        if gradient is None or not self._attached or _is_compiling():
            return
        try:
            # the hook of another device's gradient may be writing in its own thread
            with self._progress.lock:
                # the gradients of parameters that come next belong to this page, too
                self._page = page
                without_modes(self.record, info, role, page, gradient)
        except Exception as error:
            if from_outside(error):
                raise
            self._fault("gradient hook", error)
        if self._sync:
            self._judging.finish_and_raise("gradient hook")

    def note_parameter(self, info: ModuleInfo, role: str, parameter: torch.Tensor) -> None:
        """Start to read the gradient of a parameter before other hooks get it."""
        if self._attached and not self._progress.skipped and not _is_compiling():
            try:
                with self._progress.lock:
                    without_modes(self._note, info, role, parameter)
            except Exception as error:
                if from_outside(error):
                    raise
                self._fault("parameter hook", error)

    def of_first_parameter(self, info: ModuleInfo, role: str, parameter: torch.Tensor) -> None:
        """Record the local gradient of the first parameter of a root, in skipped batches too.

        It is the last one of a backward, as a rule, and shows what any operation before it has made.
        """
        if not self._progress.skipped:
            self.of_parameter(info, role, parameter)
        elif self._attached and not _is_compiling():
            with self._faults, self._progress.lock:
                gradient = gradient_of(parameter)
                if gradient is not None and not self._kept.is_finite(info, role, gradient):
                    without_modes(self._of_skipped, info, role, gradient)

    def _of_skipped(self, info: ModuleInfo, role: str, gradient: torch.Tensor) -> None:
        page = self._kept.page_of(info.root)
        self.find_graph_of(page)
        self.current = gradient
        try:
            self._kept.of_gradient(page, info, role, gradient, self.mark(page))
        finally:
            self.current = None

    def find_graph_of(self, page: OpenPage) -> None:
        """A gradient of a skipped batch may not be finite: what explains it asks for the graph of its backward."""

    def of_parameter(self, info: ModuleInfo, role: str, parameter: torch.Tensor) -> None:
        """Record the local gradient of a parameter."""
        if not self._attached or self._progress.skipped or _is_compiling():
            return
        try:
            with self._progress.lock:
                without_modes(self._record, info, role, parameter)
        except Exception as error:
            if from_outside(error):
                raise
            self._fault("parameter hook", error)
        if self._sync:
            self._judging.finish_and_raise("gradient hook")

    def _note(self, info: ModuleInfo, role: str, parameter: torch.Tensor) -> None:
        gradient = gradient_of(parameter)
        page = self._page_for(info) if gradient is not None else None
        if gradient is not None and page is not None:
            self._accumulated.note(
                parameter, page, gradient, self._read(info, role, page, gradient), self._progress.step
            )

    def _record(self, info: ModuleInfo, role: str, parameter: torch.Tensor) -> None:
        early, gradient = self._accumulated.pop(parameter), gradient_of(parameter)
        fate = fate_of(early, gradient, self._progress.step) if early is not None else GradientFate.CHANGED
        if fate is GradientFate.REPLACED:
            return
        if early is not None and fate is not GradientFate.CHANGED:
            self._put(info, early.page, early.row, early.gradient if fate is GradientFate.LEFT else None)
        else:
            page = self._page_for(info) if gradient is not None else None
            if gradient is None or page is None:
                return
            self.record(info, role, page, gradient)
        if gradient is not None and fate is not GradientFate.TAKEN:
            # weak: `zero_grad(set_to_none=True)` must free it. The next accumulation adds in place, and raises the
            # version.
            self.local[id(gradient)] = (weakref.ref(gradient), version_of(gradient))

    def _page_for(self, info: ModuleInfo) -> OpenPage | None:
        """The page for the gradient of a parameter."""
        if self.before_parameter is not None:
            self.before_parameter(info)
        return self._page or info.root.page

    def record(self, info: ModuleInfo, role: str, page: OpenPage, gradient: torch.Tensor) -> None:
        """Write one gradient as a frame of its own."""
        self._put(info, page, self._read(info, role, page, gradient), gradient)

    def _read(self, info: ModuleInfo, role: str, page: OpenPage, gradient: torch.Tensor) -> RecordedRow:
        progress = self._progress
        progress.resume(page)
        progress.enter(RankPhase.BACKWARD, info.id)
        self._rows.count_in(page.batch)
        return self._rows.gradient(info, role, gradient, self.mark(page))

    def _put(self, info: ModuleInfo, page: OpenPage, row: RecordedRow, gradient: torch.Tensor | None) -> None:
        """`gradient`: where the numbers of the row still are."""
        self._progress.resume(page)  # another hook may have stepped
        # a second look at an alarm reads the tensor itself
        self.current = gradient
        try:
            self._frames.put(page, info, FramePhase.BACKWARD, [row])
        finally:
            self.current = None

    def mark(self, page: OpenPage) -> int:
        """What is known of a gradient of this page's backward beside its numbers."""
        return (RowMark.SCALED if self.scaled else 0) | (RowMark.REHEARSED if page.rehearses else 0)

    def page_of(self, root: RootInfo) -> OpenPage | None:
        """The page of the running backward, if it belongs to this root."""
        return self._page if self._page is not None and self._page.root == root.id else None

    def is_local(self, gradient: torch.Tensor) -> bool:
        """Whether this gradient was recorded and not changed in place since."""
        known = self.local.get(id(gradient))
        return known is not None and known[0]() is gradient and known[1] == version_of(gradient)
