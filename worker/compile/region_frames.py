"""Turns the numbers that a compiled region wrote into frames, in eager code, after each run of its graph."""

from __future__ import annotations

from typing import Any

import torch

from ...core.frames import FramePhase, RowKind
from ...core.recorder.layout import NOTHING
from ...core.recorder.writer import OpenPage
from ...core.roles import RoleKind, parse_role, role_of_parameter
from ...core.values import decode
from ..device.device import without_modes
from ..record.frame_writer import FrameWriter
from ..record.recorded_row import RecordedRow
from ..record.roots import ModuleInfo, RootInfo
from .dynamo import SEEN, on_device
from .region_calls import RegionCall
from .region_parts import GradientHooks, RegionFrame, RegionPolicy, RegionRow
from .regions import RankRegions, Region
from .trace import MARK


class RegionPages:
    """Writes the frames of the regions that have run."""

    def __init__(
        self, regions: RankRegions, policy: RegionPolicy, frames: FrameWriter, gradients: GradientHooks
    ) -> None:
        self._regions, self._policy, self._frames, self._gradients = regions, policy, frames, gradients
        self._progress, self._roots, self._rows = frames.progress, frames.roots, frames.rows
        self._recorder = self._progress.recorder
        self._grads = "grads" in self._progress.settings.watch
        self._seen: dict[int, RecordedRow] = {}
        """place -> its row in the page, for the last region that ran."""
        self._inputs: list[RecordedRow] = []
        """Input rows of that region's calls whose tensors no call of the region returned."""

    def record(
        self,
        under: ModuleInfo | None = None,
        parent: int = NOTHING,
        depth: int = 0,
        phase: FramePhase = FramePhase.FORWARD,
    ) -> bool:
        """Write the frames of the graphs that have run since the last call, in the call `under`.

        `parent` is the id of the module that called the outermost of them, `depth` is theirs. True if the frame of a
        region's root is missing: dynamo may begin to trace inside the root.
        """
        rootless = False
        for region in self._regions.regions:
            self._take_gradients(region, None)
            if region.moved():
                rootless |= without_modes(self._forward, region, under, parent, depth, phase)
        return rootless

    def record_gradients(self, info: ModuleInfo) -> None:
        """Write the frames of the running backward so far. A parameter of `info` has just got its gradient."""
        for region in self._regions.regions:
            if region.moved():
                without_modes(self._forward, region, None, NOTHING, 0, FramePhase.FORWARD)
            self._take_gradients(region, info)

    def skip(self) -> None:
        """A module whose graph others may share is entered, in a batch that is skipped."""
        for region in self._regions.regions:
            if region.moved():
                region.skip()
                region.forget()

    def discard(self) -> None:
        """Drop the runs so far: a module is entered whose graph others may share, and none of them made those runs."""
        for region in self._regions.regions:
            if region.is_written and region.runs.is_shared and region.moved():
                region.forget()
                self._policy.not_looked_into(None, region.cls)

    def batch_ends(self, root: RootInfo) -> None:
        """Report gradients of this root's graphs that were made but not recorded, after its backward."""
        for region in self._regions.regions:
            for run in region.runs.batch_ends(root, self._gradients.has_run):
                if any(frame.info.watched for frame in run.frames):
                    self._policy.not_looked_into(run.under or region.runs.owner_info, region.cls)

    def _page(self, root: RootInfo, under: ModuleInfo | None) -> OpenPage:
        """The page of the batch: the current one, or a new one if no hook runs outside of the graph."""
        if under is not None and self._recorder.page is not None:
            return self._recorder.page
        root.batches += 1
        page = self._progress.begin_page(root)
        self._rows.begin_page(page.batch)
        return page

    def _forward(self, region: Region, under: ModuleInfo | None, parent: int, depth: int, phase: FramePhase) -> bool:
        try:
            if self._progress.skipped:
                region.skip()
                return False
            if region.has_missed_a_run:
                self._policy.not_looked_into(None, region.cls)
            run = region.runs.run_of(under, lambda module, inside: self._roots.child(module, inside.root, inside))
            if run is None:
                self._policy.not_looked_into(under, region.cls)
                return False
            rooted = any(not frame.info.name for frame in run.frames)
            page = self._page((run.under or region.root).root, under)
            region.runs.begin(run, page.number, phase is FramePhase.RECOMPUTE)
            if rooted:
                parent, depth = NOTHING, 0
            seen = self._seen = {}
            self._inputs = []
            with self._rows.together():
                for frame in run.frames:
                    if frame.info.watched:
                        self._put(frame, page, seen, parent, depth, phase)
            return not rooted
        finally:
            region.forget()

    def _put(
        self,
        frame: RegionFrame,
        page: OpenPage,
        seen: dict[int, RecordedRow],
        parent: int,
        depth: int,
        phase: FramePhase,
    ) -> None:
        info = frame.info
        rows: list[RecordedRow] = []
        bad = False
        for traced in frame.rows:
            row = self._row(frame, traced, seen)
            returned = parse_role(traced.role).kind is RoleKind.OUTPUT
            bad = bad or (returned and row.flags != 0)
            rows.append(row if returned else row._replace(notable=False))
        module = info.ref()
        for name, parameter in module._parameters.items() if module is not None and self._grads else ():
            if parameter is not None:  # FSDP gathers it in each call
                self._gradients.watch_parameter(parameter, info, role_of_parameter(name))
        if module is not None and self._progress.watches_weights:
            read = self._rows.weight_again if bad else self._rows.weight
            step = self._progress.step
            rows[:0] = [
                read(info, role_of_parameter(name), parameter, step)
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
        if frame.parent is not None:
            parent = frame.parent.id
        self._frames.put(page, info, phase, rows, parent=parent, depth=frame.depth + depth)

    def _row(self, frame: RegionFrame, traced: RegionRow, seen: dict[int, RecordedRow]) -> RecordedRow:
        place = traced.place
        if place < 0:
            return self._rows.traced(frame.info, traced.role, traced.dtype, traced.kind)
        known = seen.get(place)
        if known is not None:
            return self._rows.traced(frame.info, traced.role, traced.dtype, RowKind.MEASURED, known)
        source = SEEN[place] or on_device(place)
        kind = RowKind.MEASURED if source is not None else RowKind.NOT_MEASURABLE  # the graph stopped before this place
        row = self._rows.traced(frame.info, traced.role, traced.dtype, kind, source)
        seen[place] = row
        if parse_role(traced.role).kind is not RoleKind.OUTPUT:
            self._inputs.append(row)
        return row

    def leaf(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """The row of an output of the call around the graph. The graph's own calls have its numbers."""
        known = self._of_the_graph(leaf)
        if known is None:
            return self._rows.leaf(info, role, leaf)
        return self._rows.traced(info, role, leaf.dtype, RowKind.MEASURED, known)

    def argument(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """The row of an input of the call around the graph."""
        known = self._of_the_graph(leaf)
        if known is None:
            row = self._rows.argument(info, role, leaf)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                known = next((other for other in self._inputs if row.fresh and row.high and _same(row, other)), None)
            if known is None:
                return row
        return self._rows.traced(info, role, leaf.dtype, RowKind.MEASURED, known)._replace(notable=False)

    def _of_the_graph(self, leaf: Any) -> RecordedRow | None:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return None
        return self._seen.get(vars(leaf).pop(MARK, -1))

    def _take_gradients(self, region: Region, owner: ModuleInfo | None) -> None:
        run, found = region.runs.new_gradients(owner, self._gradients.has_run)
        if run is not None and found:
            try:
                without_modes(self._backward, region, run, found)
            finally:
                for position in found:
                    SEEN[run.gradients[position].place] = None

    def _backward(self, region: Region, run: RegionCall, found: list[int]) -> None:
        page = (run.under or region.root).root.page
        if page is None or self._progress.skipped:
            return
        self._progress.resume(page)
        mark = self._gradients.mark(page)
        with self._rows.together():
            for position in found:
                gradient = run.gradients[position]
                info, traced = gradient.frame.info, gradient.row
                if info.watched:
                    source = run.source(position)
                    role = f"grad {traced.role}"
                    row = self._rows.traced(info, role, traced.dtype, RowKind.MEASURED, source, mark)
                    self._frames.put(page, info, FramePhase.BACKWARD, [row])


def _same(row: RecordedRow, other: RecordedRow) -> bool:
    """Whether two rows have the same numbers. One was read from the tensor, the other inside the graph."""
    if row.packed[3] != other.packed[3] or row.flags != other.flags:
        return False
    mine = decode(row.high, row.meta >> 8 & 0xFF)
    theirs = decode(other.high, other.meta >> 8 & 0xFF)
    return mine == theirs or (mine != mine and theirs != theirs)
