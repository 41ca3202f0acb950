"""How large the outputs of modules were, batch by batch: as it is kept, sent and stored. Numbers only, with NumPy.

A number is the upper half of a float32: 2 bytes, 8 bits of precision, and inf and nan as they are. ABSENT is none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy

from ..frames import Phase, RowKind
from ..recorder.page_tables import PageTables
from ..records import Definition, SlotDef
from ..roles import RoleKind, parse_role
from ..values import Encoding
from .messages import History

ABSENT = 0xFFFF
"""A nan with its sign: no absolute value is that."""
NO_NUMBER = -1.0
"""What ABSENT is once it is unpacked: no absolute value is that."""
_NAN, _INF = 0x7FC0, 0x7F80
_FINITE = 0x7F7F
"""The largest finite number."""
_MOST_CELLS = 8 << 20
"""Of one history that is received."""


class Reading(NamedTuple):
    """One batch: the columns that have a number, the numbers, and their dtypes. `pending`: more are on their way."""

    columns: Any
    codes: Any
    dtypes: Any
    pending: bool


class OutputSlots:
    """Which slots are about what a module returned, in the order in which they were defined."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self._column = numpy.full(0, -1, numpy.int64)

    def define(self, entries: Iterable[Definition]) -> None:
        """Take new definitions."""
        for entry in entries:
            if (
                isinstance(entry, SlotDef)
                and parse_role(entry.role).kind is RoleKind.OUTPUT
                and 0 <= entry.id < 1 << 20
            ):
                if entry.id >= len(self._column):
                    grown = numpy.full(2 * entry.id + 64, -1, numpy.int64)
                    grown[: len(self._column)] = self._column
                    self._column = grown
                if self._column[entry.id] < 0:
                    self._column[entry.id] = len(self.slots)
                    self.slots.append(entry.id)

    def read(self, page: PageTables) -> Reading:
        """abs max of each output of the page's forward; of a module that was called twice, the larger one."""
        rows = page.rows
        slots = rows["slot"].astype(numpy.int64)
        known = slots < len(self._column)
        columns = (
            numpy.where(known, self._column[numpy.where(known, slots, 0)], -1) if len(self._column) else slots * 0 - 1
        )
        positions = page.positions
        meta = page.values["meta"][numpy.maximum(positions, 0)] if len(page.values) else numpy.zeros(len(rows), "<i8")
        wanted = (
            (columns >= 0) & (positions >= 0) & (rows["kind"] == RowKind.MEASURED) & page.rows_of_phase(Phase.FORWARD)
        )
        pending = (meta >> 8 & 0xFF) == 0xFF
        chosen = wanted & ~pending
        codes = _codes(page.values["high"][positions[chosen]], meta[chosen]) if chosen.any() else numpy.zeros(0, "<u2")
        found, inverse = numpy.unique(columns[chosen], return_inverse=True)
        largest = numpy.zeros(len(found), numpy.uint16)
        numpy.maximum.at(largest, inverse, codes)  # nan is above inf, which is above every number
        dtypes = numpy.zeros(len(found), numpy.uint8)
        dtypes[inverse] = rows["dtype"][chosen]
        return Reading(found, largest, dtypes, bool((wanted & pending).any()))


def _codes(high: Any, meta: Any) -> Any:
    """The largest absolute values as codes."""
    bits, encoding, flags = high.astype(numpy.int64), meta >> 8 & 0xFF, meta & 0xFF
    found = numpy.zeros(len(bits), numpy.float32)
    with numpy.errstate(over="ignore"):
        for code, view in ((Encoding.FLOAT32, "<u4"), (Encoding.FLOAT16, "<u2"), (Encoding.FLOAT64, "<u8")):
            chosen = encoding == code
            if chosen.any():
                found[chosen] = bits[chosen].astype(view).view(view.replace("u", "f")).astype(numpy.float32)
    chosen = encoding == Encoding.INTEGER
    found[chosen] = bits[chosen]
    codes = (found.view(numpy.uint32) + 0x8000 >> 16).astype(numpy.uint16)  # the nearest one
    chosen = encoding == Encoding.BFLOAT16
    codes[chosen] = bits[chosen]
    codes = numpy.minimum(codes, _FINITE)
    codes[flags != 0] = _INF
    codes[flags & 1 != 0] = _NAN
    return codes.astype(numpy.uint16)


def pack(codes: Any) -> bytes:
    """A table of codes, batches by columns, for the wire."""
    return zlib.compress(codes.astype("<u2").tobytes(), 1)


def unpack(history: History) -> Any:
    """The numbers again, float32 of shape (batches, columns); -1 where there is none.

    Raises ValueError for bytes that no agent sends.
    """
    batches, columns = len(history.batches), len(history.slots)
    if batches * columns > _MOST_CELLS or len(history.dtypes) != columns or len(history.steps) != batches:
        raise ValueError(f"a history of {batches} batches and {columns} columns")
    size = 2 * batches * columns
    try:
        data = zlib.decompressobj().decompress(history.codes, size + 1)
    except zlib.error as error:
        raise ValueError(f"a history that cannot be unpacked: {error}") from error
    if len(data) != size:
        raise ValueError(f"a history of {size} bytes that has {len(data)}")
    codes = numpy.frombuffer(data, "<u2").reshape(batches, columns)
    numbers = (codes.astype(numpy.uint32) << 16).view(numpy.float32)
    return numpy.where(codes == ABSENT, numpy.float32(NO_NUMBER), numbers)
