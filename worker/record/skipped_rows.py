"""What is still read in a batch that is skipped (`--every`): what its root returns, and one gradient.

A frame is written only where one of these may not be finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...core.frames import FramePhase, RowMark, module_text
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.writer import OpenPage
from ...core.text import shown_name
from ...core.values import Value
from ..device.device import is_on_device
from .frame_writer import FrameWriter
from .names import outputs_of
from .recorded_row import RecordedRow
from .roots import ModuleInfo, RootInfo
from .tensor_stats import measure
from .value_jumps import ValueJumps

_SKIPPED = int(RowMark.SKIPPED)
MarkOfPage = Callable[[OpenPage], int]
"""What is known of the gradients of a page's backward beside their numbers: flags of RowMark."""


@dataclass(eq=False, repr=False)
class SkippedRows:
    """The rows of one rank. The caller holds the recorder's lock, and is outside of the script's torch modes."""

    _frames: FrameWriter

    def __post_init__(self) -> None:
        self._progress, self._rows = self._frames.progress, self._frames.rows
        self._own = OwnPages(self._progress.recorder)
        self._arriving: list[tuple[OpenPage, int]] = []
        """(page, index) of frames whose numbers a device still makes: they are compared once these are there."""

    def of_output(self, info: ModuleInfo, output: Any) -> None:
        """The root has returned `output`: tensors in any containers."""
        self._compare_arrived()
        numbers = [
            (role, leaf)
            for role, leaf in outputs_of(output)
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        if numbers:
            page = self._begin(info.root)
            rows = [self._rows.leaf(info, role, leaf, _SKIPPED) for role, leaf in numbers]
            if not self._put(page, info, FramePhase.FORWARD, rows):
                for (role, _), row in zip(numbers, rows, strict=True):
                    self._compare(info, role, row.high, row.meta)
        self._progress.recorder.pause_page()

    def of_gradient(self, info: ModuleInfo, role: str, gradient: torch.Tensor, mark: MarkOfPage) -> None:
        """The backward has made a gradient of a parameter."""
        numbers = None if is_on_device(gradient) else measure(gradient)
        if numbers is not None and not numbers.meta & 0xFF:
            self._compare(info, role, numbers.high, numbers.meta)
            return  # finite: no page is opened
        root = info.root
        page = root.page
        if page is None or page.batch != root.batches - 1:  # it returned no tensor of numbers
            page = self._begin(root)
        self._progress.resume(page)
        row = self._rows.gradient(info, role, gradient, mark(page) | _SKIPPED, numbers)
        self._put(page, info, FramePhase.BACKWARD, [row])
        self._rows.flush()
        self._progress.recorder.pause_page()

    def _begin(self, root: RootInfo) -> OpenPage:
        page = self._progress.begin_page(root)
        self._rows.begin_page(page.batch)
        return page

    def _put(self, page: OpenPage, info: ModuleInfo, phase: FramePhase, rows: list[RecordedRow]) -> bool:
        """Whether a frame was written: False if all are finite."""
        is_due = any(row.flags or row.pending for row in rows)
        if is_due:
            index = self._frames.put(page, info, phase, rows)
            if self._progress.jumps is not None and any(row.pending for row in rows):
                self._arriving.append((page, index))
        return is_due

    def _compare(self, info: ModuleInfo, role: str, high: int, meta: int) -> None:
        """Have the next batches watched whole if this abs max is out of line with those before it."""
        if self._progress.jumps is None or not meta:  # 0: it could not be measured
            return
        abs_max = Value(0, high, meta).abs_max
        jump = self._jump(self._progress.jumps, info.root.id, info.name, info.cls, role, abs_max)
        if jump:
            self._progress.alert(self._progress.where(root=info.root.label), jump)

    def _compare_arrived(self) -> None:
        """Likewise for numbers that a device has made since. The batches between were skipped as well."""
        jumps, arriving = self._progress.jumps, self._arriving
        while jumps is not None and arriving and arriving[0][0].number not in self._rows.late_pages:
            page, index = arriving.pop(0)
            frame = self._own.frame(page, index)
            if frame is None:  # overwritten
                continue
            for row in frame.rows:
                if row.abs_max is None:
                    continue
                jump = self._jump(jumps, page.root, frame.module, frame.cls, row.role, row.abs_max)
                if jump:
                    self._progress.alert(self._progress.where_of(page, frame), jump)

    @staticmethod
    def _jump(jumps: ValueJumps, root: int, module: str, cls: str, role: str, abs_max: float) -> str:
        """What is out of line; "" if nothing is."""
        if not jumps.is_jump((root, module, role), abs_max):
            return ""
        return f"a jump to {abs_max:.3g} in {shown_name(role)} of {module_text(module, cls)}"
