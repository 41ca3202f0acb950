from __future__ import annotations

import msgspec
import pytest
from gpuwatch.core.frames import (
    HEADER,
    Frame,
    FramePhase,
    Row,
    RowKind,
    format_frame,
    format_frames,
    format_number,
    format_row,
)
from gpuwatch.core.values import NonFinite


def row(role="weight", low=0.5, high=2.0, flags=NonFinite.NONE, kind="measured") -> Row:
    return Row(
        role,
        low,
        high,
        bool(flags & NonFinite.NAN),
        bool(flags & (NonFinite.POSINF | NonFinite.INF)),
        bool(flags & NonFinite.NEGINF),
        "float32",
        [2],
        kind,
        int(flags),
    )


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (row(), "5.00e-01 2.00e+00 weight"),
        (row("input[0]", 0.0, 0.0), "0.00e+00 0.00e+00 input[0]"),
        (row("output", 1e-45, 3.4028235e38), "1.00e-45 3.40e+38 output"),
        (row("before input[0]"), "5.00e-01 2.00e+00 before input[0]"),
        (row("output", 8.11e-2, INF, NonFinite.POSINF), "8.11e-02      inf output"),
        (row("output", INF, INF, NonFinite.NEGINF), "     inf      inf output"),
        (row("output", 1.0, NAN, NonFinite.NAN), "     nan      nan output"),
        (row("input[1]", None, None, kind="none"), "             None input[1]"),
        (row("input[1]", None, None, kind="not_a_tensor"), "     not a tensor input[1]"),
        (row("input[1]", None, None, kind="not_measurable"), "   not measurable input[1]"),
        (row("input[1]", None, None, kind="empty"), "            empty input[1]"),
        (row("input[1]", None, None, kind="lost"), "             lost input[1]"),
    ],
)
def test_a_row_as_text(given, line):
    assert format_row(given) == line


def test_a_number_that_is_not_there_keeps_the_width():
    assert format_number(None) == "       -"
    assert format_number(1e200) == "1.00e+200"


def frame() -> Frame:
    rows = [
        row("weight", 3.82e-8, 2.17),
        row("input[0]", 1.15e-5, 9.31e3),
        row("kwargs.mask", 0, 1),
        row("output", 8.11e-2, INF, NonFinite.POSINF),
    ]
    return Frame(0, 4, "encoder.block.1.feed_forward.wo", "Linear", "forward", rows)


def test_frames_keep_the_format_that_users_know():
    assert format_frames([frame()]) == "\n".join(
        [
            "abs min  abs max  metadata",
            "                  encoder.block.1.feed_forward.wo Linear",
            "3.82e-08 2.17e+00 weight",
            "1.15e-05 9.31e+03 input[0]",
            "0.00e+00 1.00e+00 kwargs.mask",
            "8.11e-02      inf output",
        ]
    )


def test_no_frames_are_a_header_alone():
    assert format_frames([]) == HEADER


def test_two_frames_share_one_header():
    assert format_frames([frame(), frame()]).splitlines() == [HEADER, *format_frame(frame()), *format_frame(frame())]


def test_rows_are_told_apart_by_their_role():
    assert [r.role for r in frame().weights] == ["weight"]
    assert [r.role for r in frame().inputs] == ["input[0]", "kwargs.mask"]
    assert [r.role for r in frame().outputs] == ["output"]


def test_gradients_and_states_are_rows_of_their_own():
    rows = [row("weight"), row("grad weight"), row("grad output[0]"), row("state exp_avg weight"), row("output")]
    shown = Frame(0, 4, "fc", "Linear", "backward", rows)
    assert [r.role for r in shown.weights] == ["weight"]
    assert [r.role for r in shown.gradients] == ["grad weight", "grad output[0]"]
    assert [r.role for r in shown.outputs] == ["output"]
    assert shown.inputs == []


def test_only_neginf_is_what_a_mask_holds():
    assert row(flags=NonFinite.NEGINF).only_neginf
    assert not row(flags=NonFinite.NEGINF | NonFinite.NAN).only_neginf
    assert not row(flags=NonFinite.NEGINF).finite


def test_in_json_the_class_is_called_class_and_inf_is_null():
    decoded = msgspec.json.decode(msgspec.json.encode(frame()))
    assert decoded["class"] == "Linear"
    assert decoded["rows"][3]["abs_max"] is None
    assert decoded["rows"][3]["posinf"] is True


def test_a_frame_that_was_read_from_json_looks_the_same():
    given = frame()
    assert format_frame(msgspec.json.decode(msgspec.json.encode(given), type=Frame)) == format_frame(given)
    assert any(line.startswith("8.11e-02      inf") for line in format_frame(given))


def test_a_list_of_frames_is_a_line_for_each():
    words = "weight 2.17e+00, input[0] 9.31e+03, kwargs.mask 1.00e+00, output inf"
    name = "`encoder.block.1.feed_forward.wo` (Linear)"
    assert repr([frame()]) == f"[<batch 0, forward, {name}: {words}>]"
    many = Frame(2, 0, "", "Net", FramePhase.OPTIMIZER, [row(f"weight[{number}]") for number in range(9)])
    listed = ", ".join(f"weight[{number}] 2.00e+00" for number in range(6))
    assert repr(many) == f"<batch 2, optimizer, the root module (Net): {listed}, 3 more>"
    assert repr(Frame(2, 0, "a\nb", "Net", FramePhase.FORWARD, [])) == r"<batch 2, forward, `a\nb` (Net): no rows>"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (row(), "<weight: abs min 5.00e-01, abs max 2.00e+00, float32 [2]>"),
        (row("output", 8.11e-2, INF, NonFinite.POSINF), "<output: abs min 8.11e-02, abs max inf, float32 [2]>"),
        (row("input[1]", None, None, kind="empty"), "<input[1]: empty, float32 [2]>"),
        (Row("input[1]", None, None, False, False, False, "", None, RowKind.NONE), "<input[1]: None>"),
    ],
)
def test_a_list_of_rows_is_a_line_for_each(given, line):
    assert repr(given) == line
