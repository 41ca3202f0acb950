"""Which rows are an alarm: the rule as a table, a frame in each line."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.frames import Frame, Page, Row, RowMark
from gpuwatch.core.judge import (
    PageSoFar,
    WarningLimits,
    ZeroGradients,
    anomaly_of,
    anomaly_of_page,
    first_alarm,
    first_expected_gradient,
    judge,
)
from gpuwatch.core.values import NonFinite

NAN, POSINF, NEGINF, INF = NonFinite.NAN, NonFinite.POSINF, NonFinite.NEGINF, NonFinite.INF
SCALED, IGNORED = RowMark.SCALED, RowMark.IGNORED


def row(role: str, flags: int = 0, *, mark: int = 0, value: int = -1) -> Row:
    flags = NonFinite(flags)
    return Row(
        role,
        None if flags else 0.5,
        None if flags else 2.0,
        bool(flags & NAN),
        bool(flags & (POSINF | INF)),
        bool(flags & NEGINF),
        "float16",
        [2, 3],
        flags=int(flags),
        mark=int(mark),
        value=value,
    )


def frame(*rows: Row, phase: str = "forward", index: int = 0, module: str = "fc", **more: int) -> Frame:
    return Frame(3, index, module, "Linear", phase, list(rows), **more)


FINE = [row("weight"), row("input[0]"), row("output")]

CASES = {
    # -- what an optimizer keeps
    "an optimizer's state": (
        [row("state exp_avg weight"), row("state exp_avg_sq weight", POSINF)],
        "state exp_avg_sq weight",
    ),
    "a state beside a bad weight": ([row("weight", NAN), row("state exp_avg weight", NAN)], "weight"),
    "a state beside a weight that is waived": (
        [row("weight", NAN, mark=IGNORED), row("state exp_avg weight", NAN)],
        None,
    ),
    "a state that is waived": ([row("state exp_avg weight", NAN, mark=IGNORED)], None),
    # -- origins and carriers
    "all finite": (FINE, None),
    "no rows": ([], None),
    "nan made from finite inputs": ([row("weight"), row("input[0]"), row("output", NAN)], "output"),
    "inf made from finite inputs": ([row("weight"), row("input[0]"), row("output", POSINF)], "output"),
    "an inf whose sign nobody looked at": ([row("input[0]"), row("output", INF)], "output"),
    "both infs": ([row("input[0]"), row("output", POSINF | NEGINF)], "output"),
    "a carrier": ([row("weight"), row("input[0]", NAN), row("output", NAN)], "output"),
    "a carrier of an inf that became nan": ([row("input[0]", POSINF), row("output", NAN)], "output"),
    "the second output of two": ([row("input[0]"), row("output[0]"), row("output[1]", NAN)], "output[1]"),
    "the first of two bad outputs": ([row("output.loss", POSINF), row("output.logits", NAN)], "output.loss"),
    "no inputs at all": ([row("output", NAN)], "output"),
    # -- inputs
    "a bad input and a finite output": ([row("weight"), row("input[0]", NAN), row("output")], None),
    "an uninitialised buffer to write into": (
        [row("input[0]"), row("kwargs.out", NAN | POSINF | NEGINF), row("output")],
        None,
    ),
    "a bad input of a call that raised": ([row("weight"), row("input[0]", NAN)], None),
    "finite inputs of a call that raised": ([row("weight"), row("input[0]")], None),
    # -- masks
    "a mask as input": ([row("weight"), row("input[0]"), row("kwargs.mask", NEGINF), row("output")], None),
    "a mask that is made": ([row("input[0]"), row("output", NEGINF)], None),
    "a mask added to scores": ([row("input[0]"), row("input[1]", NEGINF), row("output", NEGINF)], None),
    "a mask that became nan": ([row("input[0]"), row("kwargs.mask", NEGINF), row("output", NAN)], "output"),
    "a mask that became +inf": ([row("input[0]", NEGINF), row("output", POSINF)], "output"),
    "-inf with a nan beside it": ([row("input[0]"), row("output", NEGINF | NAN)], "output"),
    "-inf computed with weights of its own": ([row("weight"), row("input[0]"), row("output", NEGINF)], "output"),
    "-inf computed with weights, from a mask": (
        [row("weight"), row("input[0]"), row("kwargs.mask", NEGINF), row("output", NEGINF)],
        None,
    ),
    "-inf computed with weights, from a nan": (
        [row("weight"), row("input[0]", NAN), row("output", NEGINF)],
        None,
    ),
    "-inf computed with weights, from +inf": (
        [row("weight"), row("input[0]", POSINF), row("output", NEGINF)],
        "output",
    ),
    "-inf computed without weights, from +inf": ([row("input[0]", POSINF), row("output", NEGINF)], None),
    "-inf of a call with only an optimizer's state": ([row("state exp_avg weight"), row("output", NEGINF)], None),
    # -- outputs that are inputs
    "an input passed on, the same tensor": ([row("input[0]", NAN, value=4), row("output", NAN, value=4)], None),
    "an argument by name passed on": ([row("kwargs.x", NAN, value=4), row("output[1]", NAN, value=4)], None),
    "another tensor than the input": ([row("input[0]", NAN, value=4), row("output", NAN, value=5)], "output"),
    "two tensors that nobody measured": ([row("input[0]", NAN), row("output", NAN)], "output"),
    "a buffer written into": (
        [row("input[0]", NAN, value=4), row("output", NAN, value=4), row("before input[0]", POSINF, value=3)],
        None,
    ),
    "a buffer passed on and a bad output beside it": (
        [row("input[0]", NAN, value=4), row("output[0]", NAN, value=4), row("output[1]", NAN, value=5)],
        "output[1]",
    ),
    # -- rules of the user's
    "an ignored output": ([row("input[0]"), row("output", NAN, mark=IGNORED)], None),
    "an ignored weight and a bad output": ([row("weight", NAN, mark=IGNORED), row("output", NAN)], "output"),
    "an ignored gradient": ([row("grad weight", NAN, mark=IGNORED)], None),
    "ignored and more": ([row("grad weight", NAN, mark=IGNORED | SCALED)], None),
    # -- weights
    "a bad weight": ([row("weight", NAN), row("bias"), row("input[0]"), row("output", NAN)], "weight"),
    "a bad bias": ([row("weight"), row("bias", POSINF), row("input[0]"), row("output", POSINF)], "bias"),
    "a weight of -inf": ([row("weight", NEGINF), row("input[0]"), row("output")], "weight"),
    "a bad weight of a call that raised": ([row("weight", NAN), row("input[0]", NAN)], "weight"),
    "a weight below its module's output": ([row("output", NAN), row("weight", NAN)], "weight"),
    # -- gradients
    "a nan in a gradient of an activation": ([row("grad output", NAN)], "grad output"),
    "an inf in a gradient of a weight": ([row("grad weight"), row("grad bias", POSINF)], "grad bias"),
    "-inf alone in a gradient": ([row("grad output[0]", NEGINF)], "grad output[0]"),
    "a gradient that a scaler checks": ([row("grad weight", POSINF, mark=SCALED)], None),
    "a scaled gradient of -inf": ([row("grad output", NEGINF, mark=SCALED)], None),
    "a scaled gradient, and one that is not": (
        [row("grad weight", POSINF, mark=SCALED), row("grad bias", NAN)],
        "grad bias",
    ),
    # -- the optimizer step
    "a weight after the step": ([row("weight", NAN), row("state exp_avg weight", NAN)], "weight"),
    "a state alone is evidence and no alarm": ([row("weight"), row("state exp_avg_sq weight", POSINF)], None),
}


@pytest.mark.parametrize(("rows", "role"), CASES.values(), ids=CASES)
def test_the_row_of_a_frame_that_is_an_alarm(rows, role):
    found = judge(frame(*rows)).alarm
    assert (found.role if found is not None else None) == role


def around(role: str, flags: int, mark: int, has_weights: bool, input_flags: int) -> Frame:
    """A frame with one row to be judged."""
    rows = [row("input[0]", input_flags), row(role, flags, mark=mark)]
    return frame(*([row("weight")] if has_weights else []), *rows)


@pytest.mark.parametrize("mark", [IGNORED, SCALED, IGNORED | SCALED])
def test_whatever_is_expected_is_no_alarm_in_any_row(mark):
    cases = itertools.product(range(1, 16), ("output", "grad bias"), (False, True), (0, NAN))
    for flags, role, has_weights, input_flags in cases:
        what = {"role": role, "flags": flags, "has_weights": has_weights, "input_flags": input_flags}
        assert judge(around(mark=mark, **what)).alarm is None
        later, plain = (judge(around(mark=m, **what)).alarm for m in (1 << 15, 0))
        assert (later is None) == (plain is None), "a mark of a later version hides nothing"


@pytest.mark.parametrize("flags", range(16))
def test_only_neginf_in_an_output_depends_on_where_it_came_from(flags):
    for role, has_weights, input_flags in itertools.product(("output", "grad bias"), (False, True), (0, NEGINF)):
        expected = bool(flags)
        if flags == NEGINF and role == "output":
            expected = has_weights and not input_flags
        assert (judge(around(role, flags, 0, has_weights, input_flags)).alarm is not None) == expected


# -- changed in place, waived, warned of ---------------------------------------------------------------------------


CHANGED = {
    "it was finite before": (
        [row("input[0]", NAN, value=4), row("output", NAN, value=4), row("before input[0]")],
        True,
    ),
    "it was bad before": (
        [row("input[0]", NAN, value=4), row("output", NAN, value=4), row("before input[0]", NAN)],
        False,
    ),
    "another argument was": (
        [
            row("input[0]"),
            row("input[1]", NAN, value=4),
            row("output", NAN, value=4),
            row("before input[0]", value=1),
        ],
        False,
    ),
}


@pytest.mark.parametrize(("rows", "alarms"), CHANGED.values(), ids=CHANGED)
def test_an_argument_that_the_call_changed_in_place(rows, alarms):
    assert (judge(frame(*rows)).alarm is not None) == alarms


# -- nan out of masks ---------------------------------------------------------------------------------------------


def _call(name: str, *rows: Row, depth: int = 2, parent: str | None = "attn", index: int = 0, phase: str = "forward"):
    return Frame(3, index, name, "Module", phase, list(rows), depth=depth, parent=parent)


MASKED = _call("attn.softmax", row("input[0]", NEGINF), row("output", NAN, value=5))
DROPPED = _call("attn.drop", row("input[0]", NAN, value=5), row("output", NAN, value=6))
FINITE_OUT = _call("attn.out", row("weight"), row("input[0]"), row("output"))
BAD_OUT = _call("attn.out", row("weight"), row("input[0]", NAN, value=7), row("output", NAN, value=8))
ATTENTION = _call("attn", row("input[0]"), row("output"), depth=1, parent="")
BAD_ATTENTION = _call("attn", row("input[0]"), row("output", NAN), depth=1, parent="")
ROOT = _call("", row("input[0]"), row("output"), depth=0, parent=None)
BEHIND = _call("mlp", row("weight"), row("input[0]"), row("output", POSINF), depth=1, parent="")
BAD_GRADIENT = _call("attn.out", row("grad output", NAN), depth=0, parent=None, phase="backward")

MASK_NAN = {
    "the call around it returns something finite": ([MASKED, FINITE_OUT, ATTENTION, ROOT], None, 1),
    "so did the call that was handed it": ([MASKED, DROPPED, FINITE_OUT, ATTENTION, ROOT], None, 1),
    "the call around it returns nan": ([MASKED, BAD_ATTENTION], (MASKED, "output"), 0),
    "another call got a nan that it explains": ([MASKED, BAD_OUT], (MASKED, "output"), 0),
    "it was passed on, and the call around it returns nan": ([MASKED, DROPPED, BAD_ATTENTION], (MASKED, "output"), 0),
    "a real fault behind an absorbed one": ([MASKED, FINITE_OUT, ATTENTION, BEHIND], (BEHIND, "output"), 1),
    "a real fault beside it": (
        [MASKED, _call("attn.out", row("input[0]"), row("output", NAN))],
        (_call("attn.out", row("input[0]"), row("output", NAN)), "output"),
        0,
    ),
    "nan behind an absorbed one, out of no mask": ([MASKED, ATTENTION, BAD_OUT], (BAD_OUT, "output"), 1),
    "a gradient is bad": ([MASKED, ATTENTION, BAD_GRADIENT], (BAD_GRADIENT, "grad output"), 1),
    "nobody is around it": ([_call("softmax", *MASKED.rows, parent=None, depth=0)], "output", 0),
    "nobody is around it in a forward that is run again": (
        [_call("softmax", *MASKED.rows, parent=None, depth=0, phase="recompute")],
        None,
        0,
    ),
    "inf out of a mask": ([_call("attn.exp", row("input[0]", NEGINF), row("output", POSINF))], "output", 0),
    "the call around it raised": ([MASKED, _call("attn", row("input[0]"), depth=1, parent="")], None, 0),
    "a compiled region counts depth from its own start": (
        [MASKED, _call("attn", row("input[0]"), row("output", NAN), depth=2, parent="")],
        (MASKED, "output"),
        0,
    ),
}


@pytest.mark.parametrize(("frames", "alarm", "absorbed"), MASK_NAN.values(), ids=MASK_NAN)
def test_nan_out_of_a_mask_is_decided_by_the_call_around_it(frames, alarm, absorbed):
    so_far = PageSoFar()
    judged = [(frame, so_far.judge(frame)) for frame in frames]
    judged.append((frames[-1], so_far.end()))
    alarms = [(found.of or frame, found.alarm) for frame, found in judged if found.alarm is not None]

    if alarm is None:
        assert alarms == []
    elif isinstance(alarm, str):
        assert alarms[0][1].role == alarm
    else:
        assert (alarms[0][0], alarms[0][1].role) == alarm
    assert [nan.frame.module for _, found in judged for nan in found.absorbed] == ["attn.softmax"] * absorbed
    assert first_alarm(frames) == (alarms[0] if alarms else None)


LOG = _call("attn.log", row("input[0]"), row("output", NAN, value=5))
EXP = _call("attn.exp", row("input[0]"), row("output", POSINF, value=5))
BLOCK = _call("block", row("input[0]"), row("output"), depth=1, parent="")
NAN_ROOT = _call("", row("input[0]"), row("output", NAN), depth=0, parent=None)
INF_ROOT = _call("", row("input[0]"), row("output", POSINF), depth=0, parent=None)
INF_ATTENTION = _call("attn", row("input[0]"), row("output", POSINF, value=9), depth=1, parent="")
NOTHING_TOLD = _call(
    "attn",
    row("input[0]"),
    Row("output", None, None, False, False, False, "", None, "not_a_tensor"),
    depth=1,
    parent="",
)
RAISED = _call("attn", row("input[0]"), depth=1, parent="")
HANDED_LATER = _call("late", row("input[0]", NAN, value=5), row("output", NAN, value=11), depth=1, parent="")
GRADIENT = _call("attn.log", row("grad weight", NAN), depth=0, parent=None, phase="backward")
AGAIN = _call("attn.log", *LOG.rows, depth=0, parent=None, phase="recompute")
IN_OTHER_BLOCK = _call("block.exp", row("input[0]"), row("output", POSINF, value=15), parent="block")
INF_BLOCK = _call("block", row("input[0]"), row("output", POSINF), depth=1, parent="")
ASKED_ABOUT = Frame(3, 0, "after it", "detect_overflow", "forward", [row("output", NAN)], depth=2, parent="attn")

LEADS_TO = {
    "the call around it takes it away": ([LOG, ATTENTION, ROOT], None, ["attn.log"]),
    "the model returns it": ([LOG, _call("attn", row("output", NAN), depth=1, parent=""), NAN_ROOT], LOG, []),
    "it becomes nan on its way": ([EXP, INF_ATTENTION, NAN_ROOT], EXP, []),
    "the root takes it away": ([EXP, INF_ATTENTION, ROOT], None, ["attn.exp"]),
    "a nan never becomes an inf": ([LOG, INF_ATTENTION, INF_ROOT], INF_ATTENTION, ["attn.log"]),
    "another branch is finite": ([EXP, INF_ATTENTION, BLOCK, INF_ROOT], EXP, []),
    "another branch has its own": ([LOG, ATTENTION, IN_OTHER_BLOCK, INF_BLOCK, INF_ROOT], IN_OTHER_BLOCK, ["attn.log"]),
    "what the call around it returns cannot be read": ([LOG, NOTHING_TOLD, ROOT], None, ["attn.log"]),
    "nor what is around that": ([LOG, NOTHING_TOLD, NAN_ROOT], LOG, []),
    "the call around it raised, and so did the root": ([LOG, RAISED, _call("", depth=0, parent=None)], LOG, []),
    "the root was not heard of": ([LOG], LOG, []),
    "a later call is handed it, and returns it": ([LOG, ATTENTION, HANDED_LATER, NAN_ROOT], LOG, ["attn.log"]),
    "a later call is handed it, and the root takes it away": (
        [LOG, ATTENTION, HANDED_LATER, ROOT],
        None,
        ["attn.log", "attn.log"],
    ),
    "its gradient is bad": ([LOG, ATTENTION, ROOT, GRADIENT], GRADIENT, ["attn.log"]),
    "a backward begins before it is decided": ([LOG, GRADIENT], LOG, []),
    "taken away, and a part of the forward is run again": ([LOG, ATTENTION, ROOT, AGAIN], None, ["attn.log"]),
    "only when it is run again": ([ROOT, AGAIN], AGAIN, []),
    "the script asked about it": ([ASKED_ABOUT, ATTENTION, ROOT], ASKED_ABOUT, []),
}


@pytest.mark.parametrize(("frames", "alarm", "taken"), LEADS_TO.values(), ids=LEADS_TO)
def test_a_bad_value_is_an_alarm_where_it_leads_to_what_the_model_returns(frames, alarm, taken):
    so_far = PageSoFar()
    judged = [(frame, so_far.judge(frame)) for frame in frames]
    judged.append((frames[-1], so_far.end()))

    found = [found.of or frame for frame, found in judged if found.alarm is not None]
    assert found[:1] == ([alarm] if alarm is not None else [])
    assert [bad.frame.module for _, found in judged for bad in found.absorbed] == taken
    first = first_alarm(frames)
    assert (first[0] if first is not None else None) == alarm


def test_with_sync_a_bad_value_is_an_alarm_at_once():
    so_far = PageSoFar(at_once=True)

    assert so_far.judge(LOG).alarm is not None
    assert so_far.judge(ATTENTION).absorbed == ()


def test_what_a_rule_covers_is_hidden_and_passing_it_on_is_no_alarm():
    so_far = PageSoFar()
    made = so_far.judge(frame(row("input[0]"), row("output", NAN, value=7, mark=IGNORED)))
    passed_on = so_far.judge(frame(row("input[0]"), row("output", NAN, value=7)))
    other = so_far.judge(frame(row("input[0]"), row("output", NAN, value=8)))

    assert (made.alarm, [hidden.role for hidden in made.hidden]) == (None, ["output"])
    assert (passed_on.alarm, passed_on.hidden) == (None, ())
    assert other.alarm is not None


def test_a_row_of_an_argument_is_never_hidden():
    assert judge(frame(row("input[0]", NAN, mark=IGNORED), row("output"))).hidden == ()


def test_a_warning_is_given_where_the_value_was_first_returned():
    limits = WarningLimits(near_overflow=1.0, underflow_share=0.1)
    near = msgspec.structs.replace(row("output", value=3), abs_max=40000.0, headroom=0.7)
    so_far = PageSoFar()

    assert [kind for kind, _ in so_far.judge(frame(near), limits).warnings] == ["near overflow"]
    assert so_far.judge(frame(near, module="parent"), limits).warnings == ()
    assert judge(frame(near)).warnings == (), "nobody asked"


def _gradient(**more) -> Row:
    return msgspec.structs.replace(row("grad output", mark=more.pop("mark", 0)), **more)


WARNINGS = {
    "near overflow": (_gradient(abs_max=40000.0, headroom=0.7), ["near overflow"]),
    "near overflow of what a GradScaler scales": (_gradient(abs_max=40000.0, headroom=0.7, mark=SCALED), []),
    "subnormals": (_gradient(zeros=0.5, subnormals=0.2), ["underflow"]),
    "zeros beside few subnormals": (_gradient(zeros=0.95, subnormals=0.05), []),
    "exactly zero": (_gradient(abs_min=0.0, abs_max=0.0, zeros=1.0, subnormals=0.0), ["zero"]),
}


@pytest.mark.parametrize(("gradient", "kinds"), WARNINGS.values(), ids=WARNINGS)
def test_a_warning_of_a_gradient(gradient, kinds):
    found = judge(frame(gradient, phase="backward"), WarningLimits(near_overflow=1.0, underflow_share=0.1))
    assert [kind for kind, _ in found.warnings] == kinds


@pytest.mark.parametrize(
    ("zero_in", "vanished_in"),
    [
        ((0, 10, 20), ()),  # zero by design
        ((10, 20), (10,)),
        ((0, 20, 30), (20,)),  # not in batch 10
    ],
)
def test_a_gradient_has_vanished_only_if_it_was_not_zero_before(zero_in, vanished_in):
    zeros = ZeroGradients(10)
    assert tuple(batch for batch in zero_in if zeros.has_vanished("Net", "fc", "grad output", batch)) == vanished_in


def test_a_gradient_that_a_scaler_catches_is_told_apart():
    found = judge(frame(row("grad weight"), row("grad bias", POSINF, mark=SCALED)))

    assert found.alarm is None
    assert found.scaled is not None
    assert found.scaled.role == "grad bias"


# -- pages --------------------------------------------------------------------------------------------------------


def page(*frames: Frame) -> Page:
    return Page(2, 1, 4, "Net#2", 3, 7, True, list(frames))


CLEAN = frame(*FINE, index=0)
MASK = frame(row("input[0]"), row("output", NEGINF), index=1, module="mask")
SOFTMAX = frame(row("input[0]", NEGINF), row("output", NAN), index=2, module="softmax", depth=2, seq=17, collectives=3)
AFTER = frame(row("weight"), row("input[0]", NAN), row("output", NAN), index=3, module="after")


def test_the_first_alarm_is_the_first_frame_with_one():
    found, bad = first_alarm([CLEAN, MASK, SOFTMAX, AFTER])
    assert (found, bad.role) == (SOFTMAX, "output")
    assert first_alarm([CLEAN, MASK]) is None
    assert first_alarm([]) is None


@pytest.mark.parametrize("order", list(itertools.permutations([CLEAN, MASK, SOFTMAX, AFTER])))
def test_a_pages_event_does_not_depend_on_the_order_in_which_its_frames_lie(order):
    assert anomaly_of_page(page(*order), aborts=True) == Anomaly(
        where=RunPosition(2, 1, 7, 3, "Net#2", 4, 17),
        frame=2,
        module="softmax",
        cls="Linear",
        phase="forward",
        role="output",
        value="nan",
        dtype="float16",
        shape=[2, 3],
        inputs_finite=False,
        weights_finite=True,
        aborts=True,
        collectives=3,
    )


def test_a_page_without_an_alarm_has_no_event():
    assert anomaly_of_page(page(CLEAN, MASK)) is None
    assert anomaly_of_page(page()) is None


def test_an_event_for_a_row_of_ones_own_choice_says_why():
    scaled = frame(row("grad weight", POSINF, mark=SCALED), phase="backward", index=5)
    event = anomaly_of(page(CLEAN, scaled), scaled, scaled.rows[0], cause="GradScaler skipped 12 steps in a row")
    assert (event.phase, event.role, event.value, event.frame) == ("backward", "grad weight", "+inf", 5)
    assert (event.cause, event.aborts) == ("GradScaler skipped 12 steps in a row", False)
    assert (event.inputs_finite, event.weights_finite) == (True, True)


def test_an_event_says_whether_the_weights_were_fine():
    event = anomaly_of_page(page(frame(row("weight", NAN), row("input[0]"), row("output", NAN))))
    assert (event.role, event.inputs_finite, event.weights_finite) == ("weight", True, False)


def backward(index: int, *rows: Row) -> Frame:
    return frame(*rows, phase="backward", index=index)


def test_the_first_gradient_that_a_scaler_was_to_catch():
    first = backward(4, row("grad output", POSINF, mark=SCALED))
    frames = [
        frame(row("input[0]"), row("output", POSINF), index=0),
        backward(1, row("grad output", mark=SCALED)),
        backward(2, row("grad weight", NAN, mark=SCALED | IGNORED)),
        backward(3, row("grad weight", NAN)),
        first,
        backward(5, row("grad bias", NAN, mark=SCALED)),
    ]
    assert first_expected_gradient(frames) == (first, first.rows[0])
    assert first_expected_gradient(frames[:4]) is None


def test_only_gradients_are_what_a_scaler_looks_at():
    assert first_expected_gradient([frame(row("output", NAN, mark=SCALED), row("weight", NAN, mark=SCALED))]) is None
