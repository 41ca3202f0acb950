"""The rows of what a backward begins from: the loss, which may be nan where all that modules returned is finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.frames import LOSS_CLASS, LOSS_MODULE, FramePhase
from ...core.recorder.writer import OpenPage
from .autograd_graph import AutogradGraph
from .frame_writer import FrameWriter
from .names import OUTPUTS

_MOST = 4


@dataclass(eq=False, repr=False)
class LossRows:
    """Writes a frame of `FramePhase.LOSS` for each backward that the script calls."""

    _frames: FrameWriter

    def __post_init__(self) -> None:
        self.written = 0
        """Frames so far."""

    def record(self, graph: AutogradGraph, page: OpenPage, mark: int) -> None:
        """Write the frame into the page of the root whose output the backward has reached first.

        Tensors of one element alone are read, at most 4: any other is no loss, but what the script hands a gradient of.
        Nothing is read of `torch.autograd.grad`, which scripts call for a derivative alone, and nothing while a CUDA
        graph is captured. `mark`: `RowMark` of the rows.
        """
        frames = self._frames
        if not graph.accumulates or frames.rows.is_capturing:
            return
        alive = [loss for ref in graph.losses[:_MOST] if (loss := ref()) is not None]
        losses = [loss for loss in alive if not loss.is_nested and loss.numel() == 1]
        if not losses:
            return
        self.write(losses, page, mark)

    def write(self, losses: Sequence[torch.Tensor], page: OpenPage, mark: int) -> None:
        """Write the frame of these losses of one element each."""
        frames = self._frames
        self.written += 1
        frames.progress.resume(page)
        frames.rows.count_in(page.batch)
        info = frames.roots.place(LOSS_MODULE, frames.roots.infos[page.root], LOSS_CLASS)
        roles = OUTPUTS if len(losses) > 1 else ("output",)
        rows = [frames.rows.gradient(info, role, loss, mark) for role, loss in zip(roles, losses, strict=False)]
        frames.put(page, info, FramePhase.LOSS, rows)
        page.losses += info.root.cls != LOSS_CLASS

    def page_without_modules(self, batch: int) -> OpenPage:
        """The page for a loss that reaches no module: that of the last model, or where none was called, a new one.

        `batch`: how many backwards the script has called before.
        """
        frames = self._frames
        info = frames.roots.place(LOSS_MODULE, frames.progress.root, LOSS_CLASS)
        page = info.root.page
        if page is not None and info.root.cls != LOSS_CLASS:
            return page
        info.root.batches = batch + 1
        return frames.progress.begin_page(info.root)
