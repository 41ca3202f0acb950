"""Which batches and which roots are recorded, and what is recorded of a batch that is not."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ...core.events import WatchCost
from ...core.frames import Phase, RowMark
from ...core.recorder.layout import HeadField
from ..compile.traced_hooks import is_a_backward
from ..record.alarm_frames import FrameWriter
from ..record.judging import AlarmRecorder
from ..record.leaves import outputs_of
from ..record.names import class_of, unwrap
from ..record.progress import CostMeter, RunProgress
from ..record.roots import RankRoots, RootInfo
from ..record.rows import RecordedRow, RowWriter
from ..stats.without_modes import without_modes

_SKIPPED = int(RowMark.SKIPPED)
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference")
"""Functions of torch.distributed.pipelining that run a module only to learn its shapes."""


class BatchSkipping:
    """Of one rank. While a root runs that is not recorded, `root` is a weak reference to it; else None."""

    def __init__(
        self,
        progress: RunProgress,
        roots: RankRoots,
        rows: RowWriter,
        frames: FrameWriter,
        judging: AlarmRecorder,
        fault: Callable[[str, Exception], None],
        only: torch.nn.Module | None,
    ) -> None:
        self._progress = progress
        self._roots = roots
        self._rows = rows
        self._frames = frames
        self._judging = judging
        self._fault = fault
        self._only = frozenset(map(id, only.modules())) if only is not None else None
        """Ids of the modules that may be roots; None: all."""
        self._classes = {class_of(part) for part in only.modules()} if only is not None else set()
        settings = progress.settings
        self._every, self._traced = settings.every, settings.trace_batches
        self._cost = CostMeter() if settings.measure_cost else None
        self._first_root: int | None = None
        self.root: Callable[[], torch.nn.Module | None] | None = None
        self._infers_shapes = False
        """The skipped root runs for torch's shape inference and is not a batch."""

    # -- which ones ---------------------------------------------------------------------------------------------

    def is_watched(self, *modules: torch.nn.Module | None) -> bool:
        """Whether one of these may be a root."""
        return self._only is None or not self._only.isdisjoint(map(id, modules))

    def shares_class(self, cls: str) -> bool:
        """Whether a module that may be a root, where not all may, or one in it, is of this class."""
        return cls in self._classes

    def is_main(self, root: RootInfo) -> bool:
        """Whether this root was the first one that was called."""
        return root.id == self._first_root

    def leaves_out(self, module: torch.nn.Module) -> bool:
        """Whether a call of this module outside of all others is no part of a batch."""
        inner = unwrap(module)
        if not self.is_watched(inner):
            return True  # it may contain the watched model, as a loss module does
        if isinstance(inner, torch.fx.GraphModule) and is_a_backward(type(inner).__name__):
            return True
        made = isinstance(module, torch.fx.GraphModule) or type(module).__module__ == "torch._dynamo.utils"
        if made and _is_called_from("torch._functorch."):
            return True  # torch.compile made it, of what is recorded as a graph
        if _is_shape_inference():
            self.root, self._infers_shapes = weakref.ref(module), True
            return True
        return False

    def skips_again(self, module: torch.nn.Module) -> bool:
        """Whether a part of a batch that is run again, in its backward, is of a skipped batch."""
        if self._progress.skipped:
            self.root = weakref.ref(module)
        return self._progress.skipped

    def skips(self, module: torch.nn.Module, root: RootInfo, opens_batch: bool) -> bool:
        """A root is called. Whether its batch is skipped."""
        if self._first_root is None:
            self._first_root = root.id
        if opens_batch:
            root.batches += 1
            if self._cost is not None and root.id == self._first_root:
                self._cost.batch_begins(self._is_skipped(root.batches - 1))
        self._progress.skipped = self._is_skipped(max(0, root.batches - 1))
        if not self._progress.skipped:
            return False
        self.root = weakref.ref(module)
        if opens_batch:
            self._progress.fields[HeadField.BATCHES_SKIPPED] += 1
            self._progress.fields[HeadField.BATCH] = root.batches - 1
        return True

    def _is_skipped(self, batch: int) -> bool:
        if batch in self._traced:
            return False
        return batch % 2 == 1 if self._cost is not None else batch % self._every != 0

    def take_cost(self) -> WatchCost | None:
        """What watching costs (`--measure-cost`), once it is known."""
        found = self._cost.result(self._progress.where()) if self._cost is not None else None
        if found is not None:
            self._cost = None
        return found

    # -- while one runs -----------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the module of a skipped batch runs, and lives."""
        return self.root is not None and self.root() is not None

    def goes_on(self, module: torch.nn.Module) -> bool:
        """Whether `module` is called inside the skipped root.

        It is not if an interrupt ended that root's forward without its hook.
        """
        root = self.root() if self.root is not None else None
        if root is not None and root is not module:
            return True
        self.root = None
        return False

    def ends(self, module: torch.nn.Module, output: Any) -> None:
        """The skipped root has returned: record its output, and nothing else of it. May raise OverflowDetected."""
        self.root = None
        inferred_shapes, self._infers_shapes = self._infers_shapes, False
        if output is None or inferred_shapes or self._cost is not None:
            return
        try:
            with self._progress.lock:
                without_modes(self._record, module, output)
        except Exception as error:
            self._fault("forward hook", error)
        self._judging.raise_pending()

    def _record(self, module: torch.nn.Module, output: Any) -> None:
        """Write a frame of the root's output, unless all of it is known to be finite."""
        info, _ = self._roots.enter(module)
        page = None
        rows: list[RecordedRow] = []
        for role, leaf in outputs_of(output):
            if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            if page is None:
                page = self._progress.begin_page(info.root)
                self._rows.begin_page(page.batch)
            rows.append(self._rows.leaf(info, role, leaf, _SKIPPED))
        if page is not None and any(row.flags or row.pending for row in rows):
            self._frames.put(page, info, Phase.FORWARD, rows)
        self._progress.recorder.pause_page()


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
