"""The call of a backward by the script: its loss is looked at before torch frees what the graph has saved.

A loss of modules is recorded when its backward reaches what they returned (record/loss_rows.py). A loss of tensors of
the script's own reaches no module: if it is not finite, it is recorded here, when its backward has ended.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..device.device import has_modes, is_on_device, without_modes
from ..patches import PatchLedger
from ..record.autograd_graph import AutogradGraph, GraphCalls, ReturnedOutputs, leaves_graph
from ..record.frame_writer import FrameWriter
from ..record.tensor_stats import measure
from .backward import BackwardHooks

_MOST_LOSSES = 4


@dataclass(eq=False, repr=False)
class BackwardCalls:
    """Reads what each backward begins from, if it is in host memory: one number."""

    _frames: FrameWriter
    _gradients: BackwardHooks
    _is_part: bool
    """One model is watched: losses that reach none of its modules are not looked at."""
    _look: Callable[[torch.Tensor, bool], None]
    """Called before a backward with its loss that is not finite, and whether a GradScaler has scaled that."""
    _keep: Callable[[torch.Tensor, Iterable[ReturnedOutputs], bool], Any]
    """Likewise, with a loss on a device, and what roots have returned. What it returns is kept until the loss's number
    has arrived."""

    def __post_init__(self) -> None:
        self._progress, self._rows = self._frames.progress, self._frames.rows
        self._faults, self._count = self._progress.faults.within("the loss"), 0

    def attach(self, patches: PatchLedger) -> None:
        """Stand around the function in which torch runs a backward."""
        patches.replace(torch.autograd, "_engine_run_backward", lambda before: partial(self.run, before))

    def run(self, before: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward from `outputs`, as `before` does."""
        if not kwargs.get("accumulate_grad") or torch.compiler.is_compiling():
            return before(outputs, *args, **kwargs)
        bad = self.begins(outputs, args)
        written = self._gradients.losses.written
        try:
            result = before(outputs, *args, **kwargs)
        finally:
            self._gradients.kept_loss = None  # it has reached no root
        if bad and not (self._is_part or self._progress.skipped) and self._gradients.losses.written == written:
            self.record(bad)
        return result

    def begins(self, outputs: Any, args: Sequence[Any]) -> list[torch.Tensor]:
        """The losses that are not finite, which have been looked at. `args`: as of `leaves_graph`."""
        self._count += 1
        bad: list[torch.Tensor] = []
        found: tuple[weakref.ref[torch.Tensor], ...] = ()
        with self._faults:
            for each in outputs[:_MOST_LOSSES]:
                # DTensor and other subclasses would compute: a collective, perhaps
                if type(each) is not torch.Tensor or each.layout is not torch.strided or each.is_nested:
                    continue
                if each.numel() != 1:
                    continue
                if is_on_device(each):
                    if len(outputs) == 1 and self._may_keep(args):
                        self._gradients.kept_loss = self._keep(each, self._gradients.returned, self._gradients.scaled)
                    continue
                found = (*found, weakref.ref(each))
                if _is_bad(each):
                    bad.append(each)
            self._gradients.began_from = found
            for each in bad[:1]:
                self._look(each, self._gradients.scaled)
        return bad

    def _may_keep(self, args: Sequence[Any]) -> bool:
        # a graph that the script keeps is not held until its numbers arrive
        return not (self._progress.skipped or self._rows.is_capturing or leaves_graph(args))

    def record(self, bad: list[torch.Tensor]) -> None:
        """Record these losses, whose backward has reached no module. Raises OverflowDetected if the job is to end."""
        with self._faults, self._progress.lock:
            without_modes(self._write, bad)
        self._frames.judging.raise_pending()

    def _write(self, bad: list[torch.Tensor]) -> None:
        losses, graphs = self._gradients.losses, self._gradients.graphs
        page = losses.page_without_modules(self._count - 1)
        roots = tuple(each.grad_fn for each in bad if each.grad_fn is not None)
        refs = tuple(map(weakref.ref, bad))
        before = graphs.running
        graphs.running = [AutogradGraph(roots, GraphCalls(page.number), losses=refs), *before]
        try:  # a second look at the alarm asks for it
            losses.write(bad, page, self._gradients.mark(page))
        finally:
            graphs.running = before


def _is_bad(loss: torch.Tensor) -> bool:
    if has_modes():
        return bool(without_modes(measure, loss).meta & 0xFF)
    return loss.dtype.is_floating_point and not math.isfinite(loss.item())
