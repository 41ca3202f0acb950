"""What follows from what was seen: an event, a warning, the end of the job. Decides; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.errors import OverflowDetected
from ...core.exits import ExitCode
from ...core.frames import Frame, Mark, Page, Phase
from ...core.frames import Row as DecodedRow
from ...core.recorder.layout import Field
from ...core.recorder.writer import OpenPage
from ...core.records import Anomaly, Ignored, Warned, Where
from ...core.settings import WorkerSettings
from ...core.values import COUNTED, DTYPE_CODES, DTYPE_MAX, DTYPE_NAMES, Encoding, NonFinite, Value, headroom, name_of
from ..stats.tensor_stats import CODES, LOW_PRECISION, measure
from .progress import Progress
from .roots import ModuleInfo
from .rows import Row, Rows

_MAX_ANOMALIES = 64
_MAX_WARNED = 256
_LOW = {CODES[dtype] for dtype in LOW_PRECISION if dtype in CODES}


@dataclass(frozen=True)
class NonFiniteRow:
    """One row of one frame, where something non-finite was seen."""

    page: OpenPage
    root: str
    info: ModuleInfo
    frame: int
    phase: Phase
    role: str
    row: Row
    inputs_finite: bool = True
    weights_finite: bool = True
    collectives: int = 0


class Policy:
    """Turns sightings into events, and knows whether the job is to end."""

    def __init__(self, progress: Progress, rows: Rows) -> None:
        settings = progress.settings
        self._progress = progress
        self._recorder = progress.recorder
        self._fields = progress.fields
        self._rows = rows
        self._aborts = settings.on_overflow == "abort"
        self._anomalies = 0
        self._alarmed: set[int] = set()
        """Pages that have their anomaly: what comes after it in the same batch is its consequence."""
        self.pending: Anomaly | None = None
        """Why the job is to end at the next place where it may."""
        self._warned: set[tuple[int, str]] = set()
        self._hidden: set[int] = set()
        self._underflow_share = settings.underflow_share
        self.near = near_bits(settings.near_overflow)
        """dtype code -> (bits of abs max from which on it is near overflow, bits of the largest finite number)"""

    # -- non-finite ---------------------------------------------------------------------------------------------

    def alarm(self, bad_row: NonFiniteRow, cause: str = "") -> None:
        """The first bad value of a batch."""
        page = bad_row.page
        if page.number in self._alarmed:
            return
        if len(self._alarmed) > 4096:
            self._alarmed.clear()
        self._alarmed.add(page.number)
        _, _, shape, dtype, _, _ = bad_row.row.packed
        self.record(
            Anomaly(
                where=self._progress.where(page, bad_row.root),
                frame=bad_row.frame,
                module=bad_row.info.name,
                cls=bad_row.info.cls,
                phase=bad_row.phase.name.lower(),
                role=bad_row.role,
                value=name_of(NonFinite(bad_row.row.flags)),
                dtype=DTYPE_NAMES[dtype],
                shape=self._rows.dims(shape),
                inputs_finite=bad_row.inputs_finite,
                weights_finite=bad_row.weights_finite,
                aborts=self._aborts,
                cause=cause,
                collectives=bad_row.collectives,
            )
        )

    def record(self, anomaly: Anomaly) -> None:
        """Write the event down, and remember that the job is to end, if it is."""
        self._anomalies += 1
        if self._anomalies <= _MAX_ANOMALIES:
            self._recorder.append(anomaly)
        else:  # training on with nan in every batch: the first ones are what the question is about
            self._fields[Field.RECORDS_LOST] += 1
        if anomaly.aborts and self.pending is None:
            self.pending = anomaly

    def hidden(self, bad_row: NonFiniteRow) -> None:
        """A row that a rule of the user's covers. Every one is counted, the first of each kind is an event."""
        self._fields[Field.IGNORED] += 1
        slot = bad_row.row.packed[0]
        if slot not in self._hidden:
            self._hidden.add(slot)
            self._recorder.append(
                Ignored(
                    self._progress.where(bad_row.page, bad_row.root),
                    self._rows.ignored.get(slot, ""),
                    bad_row.info.name,
                    bad_row.role,
                    name_of(NonFinite(bad_row.row.flags)),
                )
            )

    @property
    def aborts(self) -> bool:
        """Whether an overflow ends the job."""
        return self._aborts

    def record_late(self, anomaly: Anomaly) -> None:
        """An anomaly of an earlier batch, whose numbers have only now come back from the device."""
        number = anomaly.where.page
        if number not in self._alarmed:
            self._alarmed.add(number)
            self.record(anomaly)

    def notice_late(self, page: Page) -> None:
        """Warn of what a page of an earlier batch holds."""
        for frame in page.frames:
            for row in frame.rows:
                kind = kind_of_warning(frame, row, self._progress.settings)
                key = (hash((page.root, frame.module, row.role)), kind or "")
                if kind is None:
                    continue
                self._fields[Field.WARNED] += 1
                if key not in self._warned and len(self._warned) < _MAX_WARNED:
                    self._warned.add(key)
                    self._recorder.append(
                        Warned(
                            Where(page.rank, page.attempt, page.step, page.batch, page.root, page.number, frame.seq),
                            kind,
                            frame.module,
                            frame.cls,
                            frame.phase,
                            row.role,
                            row.dtype,
                            row.abs_max,
                            row.headroom,
                            row.zeros,
                            row.subnormals,
                        )
                    )

    def raise_pending(self) -> None:
        """End the job, if that is what an anomaly asked for. Raises OverflowDetected."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._fields[Field.ABORT] = ExitCode.OVERFLOW
            raise OverflowDetected(sentence(pending))

    # -- close to it --------------------------------------------------------------------------------------------

    def notice(self, page: OpenPage, root: str, info: ModuleInfo, phase: Phase, role: str, row: Row) -> None:
        """Warn of an output or a gradient that is near overflow, or in underflow."""
        dtype = row[0][3]
        near = self.near.get(dtype)
        if near is not None and near[0] <= row[3] < near[1]:
            self._warn("near overflow", page, root, info, phase, role, row)
        if row[4] & COUNTED and dtype in _LOW and is_underflow(row, phase, role, self._underflow_share):
            self._warn("underflow", page, root, info, phase, role, row)

    def _warn(self, kind: str, page: OpenPage, root: str, info: ModuleInfo, phase: Phase, role: str, row: Row) -> None:
        self._fields[Field.WARNED] += 1
        slot = row.packed[0]
        if row.packed[5] & Mark.IGNORED or (slot, kind) in self._warned or len(self._warned) >= _MAX_WARNED:
            return
        self._warned.add((slot, kind))
        value = Value(0, row.high, row.meta)
        dtype = DTYPE_NAMES[row.packed[3]]
        self._recorder.append(
            Warned(
                self._progress.where(page, root),
                kind,
                info.name,
                info.cls,
                phase.name.lower(),
                role,
                dtype,
                value.abs_max,
                headroom(value.abs_max, dtype),
                value.zeros,
                value.subnormals,
            )
        )


def is_underflow(row: Row, phase: Phase, role: str, share: float) -> bool:
    """Whether so many elements have lost precision, or a whole activation's gradient has vanished."""
    value = Value(0, row.high, row.meta)
    if not 0 < share < 1:
        return False
    if (value.subnormals or 0.0) >= share:
        return True
    return phase is Phase.BACKWARD and role.startswith("grad output") and value.zeros == 1.0


def kind_of_warning(frame: Frame, row: DecodedRow, settings: WorkerSettings) -> str | None:
    """What a decoded row of a page is a warning of; None for most. Marks of the user's rules count."""
    if not row.role.startswith(("output", "grad ")) or row.mark & Mark.IGNORED or row.flags:
        return None
    if (
        settings.near_overflow > 0
        and row.headroom is not None
        and row.headroom <= settings.near_overflow
        and row.abs_max != DTYPE_MAX.get(row.dtype)
    ):
        return "near overflow"
    share = settings.underflow_share
    if row.subnormals is None or not 0 < share < 1:
        return None
    vanished = row.zeros == 1.0 and row.role.startswith("grad output")
    return "underflow" if vanished or row.subnormals >= share else None


def near_bits(powers: float) -> dict[int, tuple[int, int]]:
    """dtype code -> (bits of the smallest number that is near overflow, bits of the largest finite one).

    The largest number itself is left out: masks are filled with it. 0 powers of two: nothing is near.
    """
    found: dict[int, tuple[int, int]] = {}
    if powers <= 0:
        return found
    for dtype, code in CODES.items():
        largest = DTYPE_MAX.get(DTYPE_NAMES[code])
        if largest is None or dtype.is_complex:
            continue
        limits = torch.tensor([largest * 2.0**-powers, largest], dtype=torch.float64, device="cpu").to(dtype)
        found[code] = (measure(limits[0]).high, measure(limits[1]).high)
    return found


def near_by_encoding(powers: float) -> dict[int, int]:
    """Encoding -> bits of the smallest number that is near overflow, for what a device looks at by itself."""
    dtypes = {"float64": Encoding.FLOAT64, "float32": Encoding.FLOAT32}
    dtypes |= {"float16": Encoding.FLOAT16, "bfloat16": Encoding.BFLOAT16}
    near = near_bits(powers)
    return {int(encoding): near[code][0] for name, encoding in dtypes.items() if (code := DTYPE_CODES[name]) in near}


def sentence(anomaly: Anomaly) -> str:
    """What the failing rank says in its exception."""
    module = f"`{anomaly.module}` ({anomaly.cls})" if anomaly.module else f"`{anomaly.cls}`"
    cause = f" ({anomaly.cause})" if anomaly.cause else ""
    return (
        f"gpuwatch: rank {anomaly.where.rank}: {anomaly.value} in {anomaly.role} of {module}, "
        f"{anomaly.phase} of batch {anomaly.where.batch}{cause}; the combined report follows when all ranks have "
        "ended. To go on training after an overflow: --on-overflow continue"
    )
