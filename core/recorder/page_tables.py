"""A page as tables: checked and searched at once with NumPy, without an object for each row.

Almost every question about a page can be answered from its numbers. So a frame becomes an object only when somebody
asks for the frames, and a row only when somebody asks for the rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import numpy

from ..frames import Frame, FramePhase, Row, RowKind
from ..values import PENDING, Value, ValueEncoding
from ..wire.messages import PageMessage
from . import layout
from .pages import FrameFields, NameTable, decode_frame, decode_row, frames_lost

# The tables of a recorder as NumPy records, to search all rows of a page at once. The bytes are layout.py's.

FRAMES = numpy.dtype(
    [
        ("module", "<u4"),
        ("parent", "<u4"),
        ("depth", "<i2"),
        ("phase", "u1"),
        ("collectives", "u1"),
        ("seq", "<i8"),
        ("first", "<u4"),
        ("count", "<u4"),
        ("index", "<u4"),
    ]
)
ROWS = numpy.dtype(
    [("slot", "<u4"), ("value", "<u4"), ("shape", "<u4"), ("dtype", "u1"), ("kind", "u1"), ("mark", "<u2")]
)
VALUES = numpy.dtype([("low", "<i8"), ("high", "<i8"), ("meta", "<i8")])
assert (FRAMES.itemsize, ROWS.itemsize, VALUES.itemsize) == (layout.FRAME.size, layout.ROW.size, layout.VALUE.size)


_MOST_BITS = numpy.full(256, (1 << 64) - 1, numpy.uint64)
"""By encoding: the largest integer that stands for a number."""
_MOST_BITS[ValueEncoding.FLOAT64] = (1 << 63) - 1
_MOST_BITS[ValueEncoding.FLOAT32] = (1 << 32) - 1
_MOST_BITS[[ValueEncoding.FLOAT16, ValueEncoding.BFLOAT16]] = (1 << 16) - 1

_ENCODING = 0xFF00
"""The bits of `meta` that are the encoding."""
_LAST_PHASE, _LAST_KIND = len(FramePhase) - 1, len(RowKind) - 1


class PageTables:
    """The tables of one page, of all its segments together."""

    def __init__(self, message: PageMessage) -> None:
        """Raises ValueError, or another error, for bytes that no recorder holds."""
        segments = message.segments
        self.batch = message.batch
        self.frames = _joined([segment.frames for segment in segments], FRAMES)
        self.rows = _joined([segment.rows for segment in segments], ROWS)
        self.values = _joined([segment.values for segment in segments], VALUES)
        self._segments = segments
        if len(self.frames) and self.frames["phase"].max() > _LAST_PHASE:
            raise ValueError("a frame has an unknown phase")
        if len(self.rows) and self.rows["kind"].max() > _LAST_KIND:
            raise ValueError("a row has an unknown kind")
        self.flags = (self.values["meta"] & 0xFF).astype(numpy.uint8)
        most = _MOST_BITS[self.values["meta"] >> 8 & 0xFF]
        for bits in ("low", "high"):
            if (self.values[bits].view(numpy.uint64) > most).any():
                raise ValueError("a value has an unknown encoding")
        counts = [len(segment.values) // layout.VALUE.size for segment in segments]
        starts = [0, *accumulate(counts)]
        order = sorted((segment.value_base, counts[n], n) for n, segment in enumerate(segments))
        self._bases = [base for base, _, _ in order]
        self._counts = [count for _, count, _ in order]
        self._starts = [starts[n] for _, _, n in order]

    @property
    def first_fields(self) -> FrameFields | None:
        """The first frame, as it was recorded."""
        return cast(FrameFields, self.frames[0].tolist()) if len(self.frames) else None

    @property
    def last_phase(self) -> int:
        """The phase of the last frame; -1 if there is none."""
        return int(self.frames["phase"][-1]) if len(self.frames) else -1

    @property
    def has_losses_alone(self) -> bool:
        """Whether all frames are of losses, or there is none."""
        return bool((self.frames["phase"] == FramePhase.LOSS.number).all())

    @property
    def lost_frames(self) -> int:
        """Frames that were overwritten before they were read, or whose rows are not all there."""
        seen = numpy.unique(self.frames["index"])
        starts, ends = self._bounds
        cut = int((ends - starts < self.frames["count"]).sum())
        return frames_lost(int(seen[-1]) if len(seen) else -1, len(seen), cut)

    def are_named(self, names: NameTable) -> bool:
        """Whether the modules of all frames and the slots of all rows are known."""
        modules, slots = numpy.unique(self.frames["module"]).tolist(), numpy.unique(self.rows["slot"]).tolist()
        return names.modules.keys() >= set(modules) and names.slots.keys() >= set(slots)

    @property
    def arrived(self) -> int:
        """Rows in frames that have their numbers."""
        there = self.has_value & ~self.is_pending
        return int((there & self._rows_of(numpy.ones(len(self.frames), bool))).sum())

    # -- frames as objects --------------------------------------------------------------------------------------

    def decode(self, names: NameTable) -> list[Frame]:
        """All frames, in their order in the page."""
        return self._decode(range(len(self.frames)), names)

    def suspicious(self, names: NameTable) -> bool:
        """Whether anything but the arguments of calls is nan or inf. Nothing else can be an alarm."""
        return bool(self.flags.any()) and bool(self._suspects(names).any())

    def decode_suspicious(self, names: NameTable) -> list[Frame]:
        """The frames with such a row."""
        bad = self._suspects(names)
        starts, ends = self._bounds
        sums = numpy.concatenate(([0], numpy.cumsum(bad)))
        return self._decode((int(place) for place in numpy.flatnonzero(sums[ends] > sums[starts])), names)

    def _decode(self, places: Iterable[int], names: NameTable) -> list[Frame]:
        starts, ends = (bound.tolist() for bound in self._bounds)
        row_bytes = self.rows.tobytes()
        fields = self.frames.tolist()
        found = [
            LazyFrame(
                self, names, row_bytes[starts[place] * layout.ROW.size : ends[place] * layout.ROW.size], fields[place]
            )
            for place in places
        ]
        return cast(list[Frame], found)

    def value_at(self, index: int) -> Value | None:
        """The numbers at an index of the page; None if they are lost."""
        place = bisect_right(self._bases, index) - 1
        if place < 0 or index - self._bases[place] >= self._counts[place]:
            return None
        low, high, meta = self.values[self._starts[place] + index - self._bases[place]].tolist()
        return Value(low, high, meta)

    # -- what pages of many ranks have in common ------------------------------------------------------------------

    def forward_modules(self) -> bytes:
        """A key: two pages with the same names have the same if their forwards called the same modules in one order."""
        return bytes(self.frames["module"][self._forward()].tobytes())

    def shape_of_calls(self) -> bytes:
        """A key: two pages with the same names have the same if their calls nest and issued collectives alike."""
        calls = self.frames[self._forward()]
        calls["first"] = calls["count"] = 0
        if len(calls) and calls["seq"].min() >= 0:
            calls["seq"] -= calls["seq"][0]
        return bytes(calls.tobytes())

    def weights(self, names: NameTable) -> bytes:
        """A key: two pages with the same names have the same if their forwards saw the same weights."""
        chosen = self._rows_of(self._forward()) & _is_one_of(self.rows["slot"], names.weight_slots)
        rows, positions = self.rows[chosen], self.positions[chosen]
        rows["value"] = positions >= 0
        return self.forward_modules() + bytes(rows.tobytes()) + bytes(self.values[positions[positions >= 0]].tobytes())

    def forward_weights(self, names: NameTable) -> list[Frame]:
        """The frames of the forward that have a weight."""
        sums = numpy.concatenate(([0], numpy.cumsum(_is_one_of(self.rows["slot"], names.weight_slots))))
        starts, ends = self._bounds
        chosen = (sums[ends] > sums[starts]) & self._forward()
        return self._decode((int(place) for place in numpy.flatnonzero(chosen)), names)

    def _suspects(self, names: NameTable) -> Any:
        if not len(self.flags):
            return numpy.zeros(len(self.rows), bool)
        positions = self.positions
        found = numpy.flatnonzero((positions >= 0) & (self.flags[positions] != 0))
        bad = numpy.zeros(len(self.rows), bool)
        bad[found[~_is_one_of(self.rows["slot"][found], names.argument_slots)]] = True
        return bad

    def _forward(self) -> Any:
        return self.frames["phase"] == FramePhase.FORWARD.number

    @cached_property
    def _bounds(self) -> tuple[Any, Any]:
        """(first row, row behind the last) of each frame."""
        frames = [len(segment.frames) // layout.FRAME.size for segment in self._segments]
        rows = [len(segment.rows) // layout.ROW.size for segment in self._segments]
        begin = numpy.repeat(numpy.concatenate(([0], numpy.cumsum(rows)))[:-1] if rows else [], frames).astype(
            numpy.int64
        )
        most = numpy.repeat(rows, frames).astype(numpy.int64)
        first = self.frames["first"].astype(numpy.int64)
        starts = numpy.minimum(first, most)
        ends = numpy.minimum(first + self.frames["count"], most)
        return begin + starts, begin + ends

    @property
    def result_rows(self) -> Any:
        """Which rows belong to frames of the forward, or of a loss."""
        return self._rows_of(self._forward() | (self.frames["phase"] == FramePhase.LOSS.number))

    def rows_of(self, phase: FramePhase) -> Any:
        """Which rows belong to frames of this phase."""
        return self._rows_of(self.frames["phase"] == phase.number)

    def _rows_of(self, chosen: Any) -> Any:
        starts, ends = self._bounds
        most = len(self.rows) + 1
        begun = numpy.bincount(starts[chosen], minlength=most)
        ended = numpy.bincount(ends[chosen], minlength=most)
        return numpy.cumsum((begun - ended)[:-1]) > 0

    @cached_property
    def has_value(self) -> Any:
        """Which rows are measured, and have their value in `values`."""
        return (self.rows["kind"] == RowKind.MEASURED.number) & (self.positions >= 0)

    @cached_property
    def is_pending(self) -> Any:
        """Which rows have numbers that are still on their way from a device; it says nothing of a row without value."""
        return self.metas & _ENCODING == PENDING

    @property
    def lacks_numbers(self) -> bool:
        """Whether numbers of any of its rows are still on their way from a device."""
        return bool((self.has_value & self.is_pending).any())

    @cached_property
    def metas(self) -> Any:
        """`meta` of the value of each row; it says nothing where that is not there."""
        return self.values["meta"][self.positions] if len(self.values) else numpy.zeros(len(self.rows), "<i8")

    @cached_property
    def positions(self) -> Any:
        """Where the value of each row is in `values`; -1: it is not there."""
        index = self.rows["value"].astype(numpy.int64)
        if not self._bases:
            return numpy.full(len(index), -1)
        bases, counts, starts = (numpy.array(each, numpy.int64) for each in (self._bases, self._counts, self._starts))
        place = numpy.searchsorted(bases, index, "right") - 1
        offset = index - bases[place]
        there = (place >= 0) & (offset < counts[place])
        return numpy.where(there, starts[place] + offset, -1)


_FIELDS_BUT_ROWS = tuple(field for field in Frame.__struct_fields__ if field != "rows")


class LazyFrame:
    """A frame of a page that was received. It has what `Frame` has, and decodes its rows when they are asked for."""

    __slots__ = ("_names", "_row_bytes", "_rows", "_tables", *_FIELDS_BUT_ROWS)

    def __init__(self, page: PageTables, names: NameTable, row_bytes: bytes, fields: FrameFields) -> None:
        bare = decode_frame(page.batch, fields, (), page.value_at, names)
        for field in _FIELDS_BUT_ROWS:
            setattr(self, field, getattr(bare, field))
        self._tables, self._names, self._row_bytes = page, names, row_bytes
        self._rows: list[Row] | None = None

    @property
    def rows(self) -> list[Row]:
        """As `Frame` has them."""
        if self._rows is None:
            rows = layout.ROW.iter_unpack(self._row_bytes)
            self._rows = [decode_row(row, self._tables.value_at, self._names) for row in rows]
        return self._rows

    title = Frame.title
    inputs = Frame.inputs
    outputs = Frame.outputs
    weights = Frame.weights
    gradients = Frame.gradients
    states = Frame.states


def whole(frame: Frame) -> Frame:
    """The frame with all its rows, to be written."""
    return Frame(*(getattr(frame, field) for field in Frame.__struct_fields__))


def _is_one_of(slots: Any, chosen: bytes) -> Any:
    """`chosen` has a byte for each slot number, and one behind them for unknown slots."""
    return numpy.frombuffer(chosen, bool)[numpy.minimum(slots, len(chosen) - 1)]


def _joined(parts: list[bytes], dtype: Any) -> Any:
    return numpy.frombuffer(bytearray().join(parts), dtype)
