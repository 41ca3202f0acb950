"""A page as tables says the same as the page decoded row by row."""

from __future__ import annotations

import pytest
from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.frames import FramePhase, RowKind, RowMark
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.page_tables import PageTables, whole
from gpuwatch.core.recorder.pages import NameTable, decode_page
from gpuwatch.core.values import DTYPE_CODES, PENDING, NonFinite, ValueEncoding
from gpuwatch.core.wire.messages import PageMessage, PageSegment
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

ENCODINGS = dict(zip(ValueEncoding, (63, 63, 32, 16, 16), strict=True))
ROLES = ("weight", "input[0]", "output", "grad weight", "grad output", "before input[0]", "state step weight")
NAMES = NameTable()
NAMES.add([RootDef(0, "Net"), ShapeDef(0, (2, 3)), ShapeDef(1, (4,))])
NAMES.add(ModuleDef(number, 0, f"layer.{number}", "Linear") for number in range(4))
NAMES.add(SlotDef(number, number % 4, role) for number, role in enumerate(ROLES))


@st.composite
def values(draw):
    encoding = draw(st.sampled_from(list(ValueEncoding)))
    bits = st.integers(0, (1 << ENCODINGS[encoding]) - 1)
    meta = draw(st.sampled_from([encoding << 8 | flags for flags in (0, 0, *NonFinite)] + [PENDING]))
    return draw(bits), draw(bits), meta


ROWS = st.tuples(
    st.integers(0, 9),  # two slots are not known
    st.one_of(st.integers(0, 40), st.just(layout.NOTHING)),
    st.integers(0, 2),
    st.sampled_from([*DTYPE_CODES.values(), 200]),
    st.sampled_from([kind.number for kind in RowKind]),
    st.integers(0, max(RowMark) * 2 - 1),
)


@st.composite
def pages(draw):
    """Some segments of a page; others can be lost."""
    segments, frame_base, value_base = [], 0, 0
    for index in range(draw(st.integers(0, 3))):
        table = draw(st.lists(values(), max_size=8))
        rows = draw(st.lists(ROWS, max_size=8))
        frames = [
            layout.FRAME.pack(
                draw(st.integers(0, 5)),
                draw(st.sampled_from([0, 1, layout.NOTHING])),
                draw(st.integers(0, 3)),
                draw(st.sampled_from([phase.number for phase in FramePhase])),
                draw(st.integers(0, 3)),
                draw(st.integers(-1, 9)),
                draw(st.integers(0, 9)),
                draw(st.integers(0, 9)),
                frame_base + number,
            )
            for number in range(draw(st.integers(0, 4)))
        ]
        if draw(st.booleans()):
            packed = [layout.VALUE.pack(*value) for value in table], [layout.ROW.pack(*row) for row in rows]
            segments.append(
                PageSegment(index, frame_base, value_base, b"".join(frames), b"".join(packed[1]), b"".join(packed[0]))
            )
        frame_base, value_base = frame_base + len(frames), value_base + len(table)
    return PageMessage(0, 0, 0, 0, 7, 3, draw(st.booleans()), segments)


def shown(frames):
    """As text: a number of a row may be nan, which equals nothing."""
    return [repr(asdict(frame) | {"rows": list(map(asdict, frame.rows))}) for frame in frames]


@pytest.mark.slow
@given(pages())
def test_tables_say_what_the_decoded_page_says(message):
    page, tables = decode_page(message, NAMES), PageTables(message)
    assert shown(whole(frame) for frame in tables.decode(NAMES)) == shown(page.frames)
    assert tables.lost_frames == page.lost_frames
    bad = [f for f in page.frames if any(r.flags and r.role not in ("input[0]", "before input[0]") for r in f.rows)]
    assert shown(whole(frame) for frame in tables.decode_suspicious(NAMES)) == shown(bad)
    assert tables.suspicious(NAMES) >= bool(bad)
    weights = [f for f in page.frames if f.phase == "forward" and f.weights]
    assert [whole(frame) for frame in tables.forward_weights(NAMES)] == weights


@given(pages(), pages())
@settings(max_examples=30, deadline=None)
def test_pages_with_equal_keys_have_equal_weights(left, right):
    mine, theirs = (PageTables(message).weights(NAMES) for message in (left, right))
    assert (PageTables(left).weights(NAMES) == mine) is True
    if mine == theirs:
        assert _weights(left) == _weights(right)


def _weights(message: PageMessage) -> list[tuple[object, ...]]:
    frames = [frame for frame in decode_page(message, NAMES).frames if frame.phase == "forward"]
    rows = [(frame.module, row) for frame in frames for row in frame.weights]
    return [(module, r.role, r.kind, r.dtype, r.shape, r.flags, r.abs_max) for module, r in rows]


FINE = layout.FRAME.pack(0, 0, 0, 0, 0, 0, 0, 1, 0), layout.ROW.pack(0, 0, 0, 1, 0, 0), layout.VALUE.pack(0, 0, 0x200)


@pytest.mark.parametrize(
    ("frames", "rows", "numbers"),
    [
        (FINE[0][:-1], FINE[1], FINE[2]),
        (FINE[0], FINE[1][:-1], FINE[2]),
        (FINE[0], FINE[1], FINE[2][:-1]),
        (layout.FRAME.pack(0, 0, 0, 99, 0, 0, 0, 1, 0), FINE[1], FINE[2]),
        (FINE[0], layout.ROW.pack(0, 0, 0, 1, 99, 0), FINE[2]),
        (FINE[0], FINE[1], layout.VALUE.pack(-1, 0, ValueEncoding.FLOAT32 << 8)),
        (FINE[0], FINE[1], layout.VALUE.pack(0, 1 << 32, ValueEncoding.FLOAT32 << 8)),
        (FINE[0], FINE[1], layout.VALUE.pack(1 << 16, 0, ValueEncoding.BFLOAT16 << 8)),
        (FINE[0], FINE[1], layout.VALUE.pack(0, -1, ValueEncoding.FLOAT64 << 8)),
    ],
)
def test_bytes_that_no_recorder_holds_are_refused_when_they_come(frames, rows, numbers):
    message = PageMessage(0, 0, 0, 0, 0, 0, True, [PageSegment(0, 0, 0, frames, rows, numbers)])
    with pytest.raises((ValueError, OverflowError)):
        PageTables(message)


def test_bases_beyond_any_page_take_no_memory():
    segment = PageSegment(0, 1 << 62, 1 << 62, FINE[0], FINE[1], FINE[2])
    tables = PageTables(PageMessage(0, 0, 0, 0, 0, 0, True, [segment]))
    (frame,) = tables.decode(NAMES)
    assert [row.kind for row in frame.rows] == ["lost"]
