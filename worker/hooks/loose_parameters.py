"""Parameters that an optimizer steps on and that no module has that was called: tensors of the script's own.

What is computed with them has no frames. Their values have: in host memory they are read after each step, and one that
is not finite gets a frame, as a weight does. That there are such parameters is recorded once for each optimizer class.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.frames import Phase
from ...core.records import LooseParameters
from ..alarms.frames import Frames
from ..record.progress import Progress
from ..record.roots import Roots
from ..record.rows import Rows
from ..stats.device import is_on_device
from ..stats.tensor_stats import measure

_MOST_TOLD = 8
Loose = list[tuple[int, int, torch.Tensor]]
"""(group, position in it, parameter)"""


class LooseReader:
    """Reads them after a step of theirs."""

    def __init__(self, progress: Progress, rows: Rows, roots: Roots, frames: Frames) -> None:
        self._progress = progress
        self._rows = rows
        self._roots = roots
        self._frames = frames
        self._told: set[tuple[str, bool]] = set()

    def after_step(self, optimizer: Any, loose: Loose) -> None:
        """The optimizer has stepped on these."""
        loose = [
            found for found in loose if self._roots.owner_of(found[2]) is None
        ]  # its module was called in the step
        if not loose:
            return
        unread = 0
        for group, position, parameter in loose:
            if is_on_device(parameter):
                unread += 1
                continue
            numbers = measure(parameter)
            if numbers.meta & 0xFF:
                name, cls = f"optimizer.param_groups[{group}]", type(optimizer).__name__
                info = self._roots.place(name, self._progress.root, cls)
                page = info.root.page
                if page is None:
                    page = self._progress.begin_page(info.root)
                else:
                    self._progress.resume(page)
                row = self._rows.gradient(info, f"params[{position}]", parameter, 0, numbers)
                self._frames.put(page, info, Phase.OPTIMIZER, [row])
        self._tell(optimizer, len(loose), unread)

    def _tell(self, optimizer: Any, count: int, unread: int) -> None:
        key = type(optimizer).__name__, unread > 0
        if key not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(key)
            self._progress.recorder.append(LooseParameters(self._progress.where(), key[0], count, unread))
