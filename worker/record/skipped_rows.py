"""What is still read in a batch that is skipped (`--every`): what its root returns, and one gradient.

A frame is written only where one of these may not be finite. Where the gradient is not, the root's comes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...core.frames import FramePhase, RowKind, RowMark, module_text
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.writer import OpenPage
from ...core.text import shown_name
from ...core.values import decode
from ..device.device import is_on_device, without_modes
from .collectives import issued
from .frame_writer import FrameWriter
from .names import outputs_of
from .recorded_row import RecordedRow
from .roots import ModuleInfo, RootInfo
from .tensor_stats import TensorStats, measure

_SKIPPED = int(RowMark.SKIPPED)
_MEASURED = RowKind.MEASURED.number
_READ = (_MEASURED, RowKind.EMPTY.number)


class _ReturnedTensor(NamedTuple):
    role: str
    shape: torch.Size
    dtype: torch.dtype
    numbers: TensorStats


class _ReturnedOutput(NamedTuple):
    """What a root has returned, where all of it was finite."""

    page: OpenPage
    info: ModuleInfo
    seq: int
    """Collectives issued by then."""
    tensors: list[_ReturnedTensor]


@dataclass(eq=False, repr=False)
class SkippedRows:
    """The rows of one rank. The caller holds the recorder's lock."""

    _frames: FrameWriter

    def __post_init__(self) -> None:
        self._progress, self._rows = self._frames.progress, self._frames.rows
        self._own = OwnPages(self._progress.recorder)
        self._arriving: list[tuple[OpenPage, int]] = []
        """(page, index) of frames whose numbers a device still makes: they are compared once these are there."""
        self._returned: _ReturnedOutput | None = None
        """Of the last skipped batch, until a frame shows it."""
        self.read_plain: Callable[[torch.Tensor], tuple[int, int, int] | None] = lambda tensor: None
        """NativeFrameWriter.numbers, if there is one."""

    def of_output(self, info: ModuleInfo, output: Any) -> None:
        """The root has returned `output`: tensors in any containers."""
        page = self._progress.next_page(info.root)
        if self._arriving:
            self._compare_arrived()
        returned: list[_ReturnedTensor] = []
        is_finite = is_read = True
        for role, leaf in outputs_of(output):
            if _has_numbers(leaf):
                numbers = self._numbers_of(leaf)
                if numbers is None or numbers.meta & 0xFF:
                    is_finite = False
                    break
                is_read = is_read and numbers.kind in _READ
                returned.append(_ReturnedTensor(role, leaf.shape, leaf.dtype, numbers))
        if is_finite:
            for role, _, _, numbers in returned:
                self._compare(info, role, numbers)
        if is_finite and is_read:
            self._returned = _ReturnedOutput(page, info, issued(), returned)
        else:
            without_modes(self._write_output, page, info, output)
        self._progress.recorder.pause_page()

    def _write_output(self, page: OpenPage, info: ModuleInfo, output: Any) -> None:
        self._open(page)
        leaves = ((role, leaf) for role, leaf in outputs_of(output) if _has_numbers(leaf))
        rows = [self._rows.leaf(info, role, leaf, _SKIPPED) for role, leaf in leaves]
        self._put(page, info, FramePhase.FORWARD, rows)

    def is_finite(self, info: ModuleInfo, role: str, gradient: torch.Tensor) -> bool:
        """Whether the gradient of a parameter, which the backward has made, is known to be finite."""
        numbers = self._numbers_of(gradient)
        if numbers is None or numbers.meta & 0xFF:
            return False
        self._compare(info, role, numbers)
        return True

    def _numbers_of(self, tensor: torch.Tensor) -> TensorStats | None:
        """Those of a tensor in host memory, whatever modes of the script are on. None for one on a device."""
        found = self.read_plain(tensor)
        if found is not None:
            return TensorStats(*found, _MEASURED)
        return None if is_on_device(tensor) else without_modes(measure, tensor)

    def page_of(self, root: RootInfo) -> OpenPage:
        """The page of the root's batch."""
        page = root.page
        if page is None or page.batch != root.batches - 1:  # its forward was not seen to return
            page = self._progress.next_page(root)
        return page

    def of_gradient(self, page: OpenPage, info: ModuleInfo, role: str, gradient: torch.Tensor, mark: int) -> None:
        """Write the frame of a gradient that may not be finite."""
        if not page.segments:
            self._open(page)
            self._show_returned(page)
        self._progress.resume(page)
        row = self._rows.gradient(info, role, gradient, mark | _SKIPPED)
        self._put(page, info, FramePhase.BACKWARD, [row])
        self._rows.flush()
        self._progress.recorder.pause_page()

    def _open(self, page: OpenPage) -> None:
        self._progress.resume(page)
        self._progress.groups.notice()
        self._rows.begin_page(page.batch)

    def _show_returned(self, page: OpenPage) -> None:
        """Write the frame of the root's call, which had nothing to show by itself."""
        returned, self._returned = self._returned, None
        if returned is None or returned.page is not page:
            return
        _, info, seq, tensors = returned
        rows = [
            self._rows.gradient(info, role, torch.empty(shape, dtype=dtype, device="meta"), _SKIPPED, numbers)
            for role, shape, dtype, numbers in tensors
        ]
        self._frames.put_unjudged(info.id, FramePhase.FORWARD, seq, [row.packed for row in rows])

    def _put(self, page: OpenPage, info: ModuleInfo, phase: FramePhase, rows: list[RecordedRow]) -> None:
        """Write a frame, unless all rows are known to be finite."""
        is_pending = any(row.pending for row in rows)
        if is_pending or any(row.flags for row in rows):
            index = self._frames.put(page, info, phase, rows)
            if self._progress.jumps is not None and is_pending:
                self._arriving.append((page, index))

    def _compare(self, info: ModuleInfo, role: str, numbers: TensorStats) -> None:
        """Have the next batches watched whole if this abs max is out of line with those before it."""
        jumps, meta = self._progress.jumps, numbers.meta
        if jumps is None or not meta:  # 0: it could not be measured
            return
        abs_max = decode(numbers.high, meta >> 8 & 0xFF)
        if jumps.is_jump((info.root.id, info.name, role), abs_max):
            place = self._progress.where(root=info.root.label)
            self._progress.alert(place, _jump_text(abs_max, role, info.name, info.cls))

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
                if jumps.is_jump((page.root, frame.module, row.role), row.abs_max):
                    text = _jump_text(row.abs_max, row.role, frame.module, frame.cls)
                    self._progress.alert(self._progress.where_of(page, frame), text)


def _jump_text(abs_max: float, role: str, module: str, cls: str) -> str:
    return f"a jump to {abs_max:.3g} in {shown_name(role)} of {module_text(module, cls)}"


def _has_numbers(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
