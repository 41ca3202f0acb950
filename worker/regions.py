"""From the buffers of compiled regions to frames: after each run of a graph, in eager code."""

from __future__ import annotations

import struct

import torch

from ..core.alarm import alarms
from ..core.frames import Mark, Phase, RowKind
from ..core.recorder.layout import NOTHING
from ..core.recorder.writer import OpenPage, RowTuple
from ..core.values import Encoding, NonFinite
from .collectives import issued
from .compiled import BUFFERS, Region, RegionFrame, RegionRow, Regions
from .gradients import Gradients
from .measure import Numbers
from .policy import Policy, Sighting
from .progress import Progress
from .roots import ModuleInfo, Roots
from .rows import Row, Rows
from .unseen import unseen


class RegionPages:
    """Puts down what the graphs have left in their buffers."""

    def __init__(
        self,
        regions: Regions,
        progress: Progress,
        roots: Roots,
        rows: Rows,
        policy: Policy,
        gradients: Gradients,
    ) -> None:
        self._regions = regions
        self._progress = progress
        self._recorder = progress.recorder
        self._roots = roots
        self._rows = rows
        self._policy = policy
        self._gradients = gradients

    def take(self, under: ModuleInfo | None = None) -> bool:
        """Look whether a graph has run since the last call, and put its rows down, below the call `under`.

        True if the frame of a region's own root was not among them: dynamo may begin to trace inside of it.
        """
        rootless = False
        for region in self._regions.regions:
            forward, backward = region.moved()
            if forward:
                rootless |= unseen(self._forward, region, under)
            if backward:
                unseen(self._backward, region)
        return rootless

    def take_gradients(self) -> None:
        """The same, from within a backward."""
        if self._regions.regions:
            self.take()

    def _page(self, region: Region) -> OpenPage:
        """The page of the batch: the one that is open, or, where no hook runs outside of the graph, a new one."""
        root = region.root.root
        if self._recorder.page is not None and self._progress.root is root:
            return self._recorder.page
        root.batches += 1
        page = self._progress.begin_page(root, True)
        self._rows.begin_page(page.batch)
        return page

    def _forward(self, region: Region, under: ModuleInfo | None) -> bool:
        if self._progress.idle:
            return False
        rooted = any(not frame.info.name for frame in region.frames)
        page = self._page(region)
        numbers = _read(region.buffers)
        values: dict[int, int] = {}
        for frame in region.frames:
            if frame.info.watched:
                self._put(frame, page, numbers, values, None if rooted else under)
        return not rooted

    def _put(
        self,
        frame: RegionFrame,
        page: OpenPage,
        numbers: dict[int, Numbers],
        values: dict[int, int],
        under: ModuleInfo | None,
    ) -> None:
        info = frame.info
        rows: list[RowTuple] = []
        alarm: tuple[str, Row] | None = None
        flags_of_weights = flags_of_inputs = 0
        module = info.ref()
        weights = list(module._parameters.items()) if module is not None and self._progress.watches_weights else []
        for name, parameter in weights:
            if parameter is not None:
                row = self._rows.weight(info, name, parameter, self._progress.step)
                rows.append(row.packed)
                if row.flags:
                    flags_of_weights |= row.flags
                    if not row.packed[5] & Mark.IGNORED:
                        alarm = alarm or (name, row)
        for traced in frame.rows:
            row = self._row(frame, traced, numbers, values)
            rows.append(row.packed)
            if not traced.role.startswith("output"):
                flags_of_inputs |= row.flags
            elif row.fresh:
                self._policy.notice(page, info.root.label, info, Phase.FORWARD, traced.role, row)
            if (
                alarm is None
                and traced.role.startswith("output")
                and row.fresh
                and alarms(
                    row.flags,
                    mark=row.packed[5],
                    is_output=True,
                    has_weights=bool(weights),
                    input_flags=flags_of_inputs,
                )
            ):
                alarm = (traced.role, row)
        parent = frame.parent or under
        depth = frame.depth + (under is not None)
        index = self._recorder.frame(
            info.id, parent.id if parent is not None else NOTHING, depth, Phase.FORWARD, issued(), rows
        )
        if alarm is not None:
            self._policy.alarm(
                Sighting(
                    page,
                    info.root.label,
                    info,
                    index,
                    Phase.FORWARD,
                    *alarm,
                    inputs_finite=not flags_of_inputs,
                    weights_finite=not flags_of_weights,
                )
            )

    def _row(self, frame: RegionFrame, traced: RegionRow, numbers: dict[int, Numbers], values: dict[int, int]) -> Row:
        known = numbers.get(traced.buffer)
        if known is None:
            kind = RowKind(traced.kind)
            return self._rows.traced(frame.info, traced.role, NOTHING, traced.dtype, kind, None)
        fresh = traced.buffer not in values
        if fresh:
            values[traced.buffer] = self._recorder.value(known.low, known.high, known.meta)
        row = self._rows.traced(frame.info, traced.role, values[traced.buffer], traced.dtype, RowKind.MEASURED, known)
        return row._replace(fresh=fresh)

    def _backward(self, region: Region) -> None:
        page = region.root.root.page
        if page is None or self._progress.idle:
            return
        self._progress.resume(page)
        numbers = _read(region.gradients)
        mark = Mark.SCALED if self._gradients.scaled else 0
        for frame in reversed(region.frames):
            for traced in reversed(frame.rows):
                known = numbers.get(traced.gradient)
                if known is not None and frame.info.watched:
                    role = f"grad {traced.role}"
                    value = self._recorder.value(known.low, known.high, known.meta)
                    row = self._rows.traced(frame.info, role, value, traced.dtype, RowKind.MEASURED, known, mark)
                    self._gradients.put(frame.info, role, page, row)


def _read(buffers: list[int]) -> dict[int, Numbers]:
    """Buffer -> its numbers. Of a device: one copy for all of them, which waits for it."""
    if not buffers:
        return {}
    by_device: dict[torch.device, list[int]] = {}
    for buffer in buffers:
        by_device.setdefault(getattr(BUFFERS, f"b{buffer}").device, []).append(buffer)
    found: dict[int, Numbers] = {}
    for on_device in by_device.values():
        table = torch.stack([getattr(BUFFERS, f"b{buffer}") for buffer in on_device]).cpu()
        for buffer, (low, high, least) in zip(on_device, table.tolist(), strict=True):
            found[buffer] = _numbers(low, high, least)
    return found


def _numbers(low: float, high: float, least: float) -> Numbers:
    """Smallest, largest and smallest absolute value as a row has them. A nan hides what inf there is beside it."""
    flags = NonFinite.NONE
    if low != low or high != high:
        flags |= NonFinite.NAN
    if high == float("inf"):
        flags |= NonFinite.POSINF
    if low == float("-inf"):
        flags |= NonFinite.NEGINF
    largest = max(abs(low), abs(high)) if not flags & NonFinite.NAN else float("nan")
    bits = [_bits(abs(least)), _bits(largest)]
    return Numbers(bits[0], bits[1], int(flags) | Encoding.FLOAT64 << 8, RowKind.MEASURED)


def _bits(number: float) -> int:

    bits = int(struct.unpack("<q", struct.pack("<d", number))[0])
    return bits & 0x7FFF_FFFF_FFFF_FFFF
