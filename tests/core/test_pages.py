from __future__ import annotations

import itertools

import pytest
from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.frames import FramePhase, RowKind, RowMark
from gpuwatch.core.recorder import layout
from gpuwatch.core.recorder.pages import NameTable, decode_page
from gpuwatch.core.values import COUNTED, DTYPE_CODES, PENDING, SHARE, NonFinite, Value, ValueEncoding
from gpuwatch.core.wire.messages import PageMessage, PageSegment

F32 = ValueEncoding.FLOAT32 << 8
ONE, TWO, INF = 0x3F800000, 0x40000000, 0x7F800000
DEFINITIONS = [
    RootDef(0, "Net"),
    RootDef(1, "Net", 1),
    ModuleDef(0, 0, "", "Net"),
    ModuleDef(1, 0, "fc", "Linear"),
    SlotDef(0, 1, "weight"),
    SlotDef(1, 1, "output"),
    ShapeDef(0, (2, 3)),
]
NOTHING = layout.NOTHING


def names(entries=DEFINITIONS) -> NameTable:
    found = NameTable()
    found.add(entries)
    return found


def segment(frames, values=(), index=0, frame_base=0, value_base=0, phase=0, collectives=0) -> PageSegment:
    rows = [row for frame in frames for row in frame[-1]]
    counts = [len(frame[-1]) for frame in frames]
    firsts = [0, *itertools.accumulate(counts)]
    packed = [
        layout.FRAME.pack(module, parent, depth, phase, collectives, 7, firsts[n], counts[n], frame_base + n)
        for n, (module, parent, depth, _) in enumerate(frames)
    ]
    return PageSegment(
        index,
        frame_base,
        value_base,
        b"".join(packed),
        b"".join(layout.ROW.pack(*row, *([0] if len(row) == 5 else [])) for row in rows),
        b"".join(layout.VALUE.pack(*value) for value in values),
    )


def page(*segments: PageSegment, root=0, complete=True) -> PageMessage:
    return PageMessage(2, 1, 4, root, 9, 3, complete, list(segments))


LINEAR = (1, 0, 1, [(0, 0, 0, DTYPE_CODES["float32"], 0), (1, 1, NOTHING, DTYPE_CODES["float16"], 0)])
VALUES = [(ONE, TWO, F32), (0, INF, F32 | NonFinite.POSINF | NonFinite.NEGINF)]


def test_numbers_get_their_names():
    decoded = decode_page(page(segment([LINEAR, (0, NOTHING, 0, [])], VALUES)), names())
    assert (decoded.rank, decoded.attempt, decoded.number, decoded.root) == (2, 1, 4, "Net")
    assert (decoded.batch, decoded.step, decoded.complete, decoded.lost_frames) == (9, 3, True, 0)
    fc, root = decoded.frames
    assert (fc.module, fc.cls, fc.phase, fc.depth, fc.parent, fc.seq, fc.batch) == (
        "fc",
        "Linear",
        "forward",
        1,
        "",
        7,
        9,
    )
    assert (root.module, root.cls, root.parent, root.rows) == ("", "Net", None, [])
    weight, output = fc.rows
    assert (weight.role, weight.abs_min, weight.abs_max, weight.dtype, weight.shape) == (
        "weight",
        1,
        2,
        "float32",
        [2, 3],
    )
    assert weight.finite
    assert (output.role, output.abs_max, output.shape, output.dtype) == ("output", float("inf"), None, "float16")
    assert (output.nan, output.posinf, output.neginf, output.value) == (False, True, True, 1)


def test_every_statistic_of_a_value_is_in_its_row():
    """A new one needs a property there and a field of the same name here: docs/development.md."""
    meta = F32 | COUNTED | SHARE << 16 | (SHARE // 3) << 32
    row = (0, 0, 0, DTYPE_CODES["float32"], 0)
    (frame,) = decode_page(page(segment([(1, 0, 1, [row])], [(ONE, TWO, meta)])), names()).frames
    value = Value(ONE, TWO, meta)
    numbers = {name for name, what in vars(Value).items() if isinstance(what, property)} - {"flags", "encoding"}
    assert {"abs_min", "abs_max", "zeros", "subnormals"} <= numbers
    for name in numbers:
        assert getattr(frame.rows[0], name) == getattr(value, name)


def test_the_second_root_of_a_class_is_told_apart():
    assert decode_page(page(root=1), names()).root == "Net#2"


def test_an_inf_whose_sign_nobody_looked_at_counts_as_positive():
    decoded = decode_page(page(segment([LINEAR], [VALUES[0], (0, INF, F32 | NonFinite.INF)])), names())
    assert decoded.frames[0].rows[1].posinf


def test_what_has_no_definition_is_shown_by_number_and_never_guessed():
    decoded = decode_page(page(segment([LINEAR], VALUES), root=5), names([]))
    assert decoded.root == "root 5"
    assert (decoded.frames[0].module, decoded.frames[0].cls, decoded.frames[0].parent) == (
        "<module 1>",
        "?",
        "<module 0>",
    )
    assert [row.role for row in decoded.frames[0].rows] == ["<slot 0>", "<slot 1>"]


def test_a_value_that_was_overwritten_is_lost_and_has_no_number():
    row = decode_page(page(segment([LINEAR], VALUES, value_base=100)), names()).frames[0].rows[0]
    assert (row.kind, row.abs_min, row.abs_max, row.flags) == ("lost", None, None, 0)


def test_a_value_in_another_segment_of_the_page_is_found():
    first = segment([], VALUES[:1])
    second = segment([LINEAR], VALUES[1:], index=1, value_base=1)
    weight, output = decode_page(page(first, second), names()).frames[0].rows
    assert (weight.abs_max, output.abs_max) == (2, float("inf"))


def test_overwritten_frames_are_counted():
    decoded = decode_page(page(segment([LINEAR] * 3, VALUES, index=1, frame_base=5)), names())
    assert [frame.index for frame in decoded.frames] == [5, 6, 7]
    assert decoded.lost_frames == 5


def test_a_gap_in_the_middle_is_counted():
    decoded = decode_page(page(segment([LINEAR], VALUES), segment([LINEAR], index=2, frame_base=4)), names())
    assert decoded.lost_frames == 3


@pytest.mark.parametrize("kind", [kind for kind in RowKind if kind is not RowKind.MEASURED])
def test_rows_without_numbers_keep_their_kind(kind):
    frame = (1, 0, 1, [(0, NOTHING, NOTHING, 0, kind.number)])
    row = decode_page(page(segment([frame])), names()).frames[0].rows[0]
    assert (row.kind, row.abs_min, row.value, row.dtype) == (kind.name.lower(), None, -1, "unknown")


def test_a_dtype_of_a_later_version_is_unknown():
    frame = (1, 0, 1, [(0, 0, 0, 250, 0)])
    assert decode_page(page(segment([frame], VALUES)), names()).frames[0].rows[0].dtype == "unknown"


def test_definitions_may_come_in_any_order_and_twice():
    message = page(segment([LINEAR], VALUES))
    assert decode_page(message, names([*reversed(DEFINITIONS), *DEFINITIONS])) == decode_page(message, names())


@pytest.mark.parametrize("phase", FramePhase)
def test_every_phase_has_its_name(phase):
    decoded = decode_page(page(segment([LINEAR], VALUES, phase=phase.number, collectives=9)), names())
    assert (decoded.frames[0].phase, decoded.frames[0].collectives) == (phase.name.lower(), 9)


@pytest.mark.parametrize("mark", [RowMark.NONE, RowMark.IGNORED | RowMark.SCALED, 0x8000])
def test_a_rows_mark_is_kept_even_one_of_a_later_version(mark):
    frame = (1, 0, 1, [(0, 0, 0, DTYPE_CODES["float32"], 0, int(mark))])
    assert decode_page(page(segment([frame], VALUES)), names()).frames[0].rows[0].mark == mark


def test_shares_and_headroom_are_there_where_they_can_be():
    counted = ValueEncoding.FLOAT16 << 8 | SHARE << 16 | (SHARE // 5) << 32 | COUNTED
    values = [(0, 0x7800, counted), (ONE, TWO, F32)]  # 0x7800 is 32768
    table = [(0, 0, 0, DTYPE_CODES["float16"], 0), (1, 1, 0, DTYPE_CODES["float32"], 0), (1, 9, 0, 1, 0)]
    half, single, lost = decode_page(page(segment([(1, 0, 1, table)], values)), names()).frames[0].rows
    assert (half.abs_max, half.zeros, half.subnormals) == (32768, 1, 0.2)
    assert half.headroom == pytest.approx(0.9993, abs=1e-4)
    assert (single.zeros, single.subnormals, single.headroom) == (None, None, pytest.approx(127, abs=1e-6))
    assert (lost.kind, lost.zeros, lost.subnormals, lost.headroom) == ("lost", None, None, None)


def test_a_non_finite_value_has_no_headroom():
    output = decode_page(page(segment([LINEAR], VALUES)), names()).frames[0].rows[1]
    assert (output.abs_max, output.headroom) == (float("inf"), None)


def test_a_value_that_is_on_its_way_is_pending_and_has_no_number():
    row = decode_page(page(segment([LINEAR], [(0, 0, PENDING), VALUES[1]])), names()).frames[0].rows[0]
    assert (row.kind, row.abs_max, row.flags, row.zeros, row.headroom) == ("pending", None, 0, None, None)
    assert row.value == 0, "it is the same tensor all the same"


def test_a_page_that_was_written_in_turns_has_its_frames_in_order():
    """Forward in one segment, backward in two later ones."""
    decoded = decode_page(
        page(
            segment([LINEAR] * 2, VALUES),
            segment([LINEAR], index=1, frame_base=2, value_base=2, phase=FramePhase.BACKWARD.number),
            segment([LINEAR], index=2, frame_base=3, value_base=2, phase=FramePhase.OPTIMIZER.number),
        ),
        names(),
    )
    assert [(frame.index, frame.phase) for frame in decoded.frames] == [
        (0, "forward"),
        (1, "forward"),
        (2, "backward"),
        (3, "optimizer"),
    ]
    assert all(frame.rows[0].abs_max == 2 for frame in decoded.frames)
    assert decoded.lost_frames == 0
