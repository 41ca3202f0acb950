"""A history as it travels: what goes in comes out, to 8 bits, and hostile bytes do no harm."""

from __future__ import annotations

import math
import struct
import zlib

import numpy
import pytest
from gpuwatch.core.events.definitions import SlotDef
from gpuwatch.core.frames import FramePhase, RowKind
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.page_tables import PageTables
from gpuwatch.core.values import DTYPE_CODES, PENDING, NonFinite, ValueEncoding
from gpuwatch.core.wire.columns import ABSENT, OutputSlots, pack, unpack
from gpuwatch.core.wire.messages import PageMessage, PageSegment, RankHistoryMessage

OUTPUT, INPUT = 0, 1


def bits(number: float, encoding: ValueEncoding) -> int:
    formats = {ValueEncoding.FLOAT64: "<dQ", ValueEncoding.FLOAT32: "<fI", ValueEncoding.FLOAT16: "<eH"}
    if encoding is ValueEncoding.BFLOAT16:
        return struct.unpack("<I", struct.pack("<f", number))[0] >> 16
    one, other = formats[encoding].replace("<", "")
    return struct.unpack(f"<{other}", struct.pack(f"<{one}", number))[0]


def page(*values: tuple[int, int, int], slots=None, phase=FramePhase.FORWARD) -> PageTables:
    """One frame with a row for each value."""
    slots = slots or [OUTPUT] * len(values)
    rows = [
        layout.ROW.pack(slot, n, 0, DTYPE_CODES["float32"], RowKind.MEASURED.number, 0) for n, slot in enumerate(slots)
    ]
    frame = layout.FRAME.pack(0, layout.NOTHING, 0, phase.number, 0, 0, 0, len(rows), 0)
    packed = b"".join(layout.VALUE.pack(*value) for value in values)
    return PageTables(PageMessage(0, 0, 0, 0, 0, 0, True, [PageSegment(0, 0, 0, frame, b"".join(rows), packed)]))


@pytest.fixture
def slots() -> OutputSlots:
    found = OutputSlots()
    found.define([SlotDef(OUTPUT, 0, "output"), SlotDef(INPUT, 0, "input[0]")])
    return found


def numbers(slots: OutputSlots, tables: PageTables) -> list[float]:
    codes = slots.read(tables).codes
    history = RankHistoryMessage(0, 0, 0, [0], [0], list(range(len(codes))), bytes(len(codes)), pack(codes[None, :]))
    return unpack(history)[0].tolist()


@pytest.mark.parametrize(
    "encoding", [ValueEncoding.FLOAT64, ValueEncoding.FLOAT32, ValueEncoding.FLOAT16, ValueEncoding.BFLOAT16]
)
@pytest.mark.parametrize("number", [0.0, 0.5, 1.0, 1000.0, 65504.0])
def test_a_number_of_each_type_is_kept_to_8_bits(slots, encoding, number):
    found = numbers(slots, page((0, bits(number, encoding), encoding << 8)))
    assert found == pytest.approx([number], rel=1 / 256)


def test_the_largest_numbers_stay_finite(slots):
    for value in (1.7e308, 3.4e38):
        encoding = ValueEncoding.FLOAT64 if value > 1e39 else ValueEncoding.FLOAT32
        (found,) = numbers(slots, page((0, bits(value, encoding), encoding << 8)))
        assert math.isfinite(found) and found > 3e38


def test_what_is_not_finite_stays_that(slots):
    inf, nan = NonFinite.POSINF | ValueEncoding.FLOAT32 << 8, NonFinite.NAN | ValueEncoding.FLOAT32 << 8
    assert numbers(slots, page((0, 0, inf))) == [math.inf]
    assert math.isnan(numbers(slots, page((0, 0, nan)))[0])


def test_of_a_module_that_was_called_twice_the_larger_one_counts(slots):
    one, two = (0, bits(1.0, ValueEncoding.FLOAT32), 2 << 8), (0, bits(8.0, ValueEncoding.FLOAT32), 2 << 8)
    assert numbers(slots, page(two, one)) == [8.0]


def test_only_what_a_forward_returned_counts(slots):
    one = (0, bits(1.0, ValueEncoding.FLOAT32), 2 << 8)
    assert numbers(slots, page(one, slots=[INPUT])) == []
    assert numbers(slots, page(one, phase=FramePhase.RECOMPUTE)) == []
    assert numbers(slots, page(one, slots=[77])) == []


def test_numbers_that_are_on_their_way_are_told(slots):
    reading = slots.read(page((0, 0, PENDING)))
    assert reading.pending and not len(reading.columns)


def history(codes=None, **changes) -> RankHistoryMessage:
    codes = pack(numpy.array([[0x3F80, ABSENT]], "<u2")) if codes is None else codes
    fields = {"batches": [3], "steps": [3], "slots": [0, 1], "dtypes": b"\1\1", **changes}
    return RankHistoryMessage(0, 0, 0, codes=codes, **fields)


def test_what_was_not_measured_is_told():
    assert unpack(history()).tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize(
    "bad",
    [
        lambda: history(b"no zlib"),
        lambda: history(zlib.compress(b"\0" * 3)),
        lambda: history(zlib.compress(b"\0" * 100_000_000)),  # made by the worker that asks: it takes its time
        lambda: history(batches=[1, 2]),
        lambda: history(steps=[]),
        lambda: history(dtypes=b""),
        lambda: history(
            batches=list(range(5000)), steps=list(range(5000)), slots=list(range(5000)), dtypes=bytes(5000)
        ),
    ],
)
def test_hostile_bytes_are_refused(bad):
    with pytest.raises(ValueError, match="a history"):
        unpack(bad())
