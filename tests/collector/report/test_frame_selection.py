"""Which frames a report shows, and how they are printed."""

from __future__ import annotations

from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report import side_by_side
from gpuwatch.collector.report.side_by_side import frames_text
from gpuwatch.collector.report.text_report import render_text


def trained(make, rank, bad=1.0, *, first="left"):
    """A forward, and a backward whose two branches come in any order."""
    batch = make.Batch(rank, batch=2)
    x, left, right, y = (batch.tensor(number) for number in (1.0, 2.0, 3.0, 4.0))
    batch.call("left", "Linear", given=[x], returned=[left])
    batch.call("right", "Linear", given=[x], returned=[right])
    batch.call("head", "Add", given=[left, right], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("head", "Add", "output", 0.5)
    for name in (first, "right" if first == "left" else "left"):
        batch.backward(name, "Linear", "output", bad if name == "left" else 0.25)
        batch.backward(name, "Linear", "weight", bad if name == "left" else 0.25)
    return batch


def report_of(make, *batches, max_frames=21):
    bodies = [make.hello(nproc=len(batches)), *(body for batch in batches for body in batch.messages())]
    facts = fold(("a0", n, body) for n, body in enumerate(bodies))
    return build_report(facts, run_id="run", started=None, ended=None, max_frames=max_frames)


def test_frames_end_with_the_bad_gradient_on_every_rank(make):
    report = report_of(make, trained(make, 0, first="right"), trained(make, 1, make.NAN), max_frames=3)
    assert report.verdict.rank == 1
    for rank in report.ranks:
        last = rank.frames[-1]
        assert (last.module, last.phase, last.rows[0].role) == ("left", "backward", "grad output")
        assert len(rank.frames) == 3


def test_frames_end_with_the_same_gradient_on_a_rank_where_it_came_elsewhere(make):
    guilty = make.Batch(1, batch=2)
    x, y = guilty.tensor(), guilty.tensor()
    guilty.call("left", "Linear", given=[x], returned=[y])
    guilty.call("", "Net", given=[x], returned=[y])
    guilty.backward("left", "Linear", "output", 1.0)
    guilty.backward("left", "Linear", "weight", make.INF)
    report = report_of(make, trained(make, 0, first="right"), guilty)
    assert [rank.frames[-1].rows[0].role for rank in report.ranks] == ["grad weight", "grad weight"]


def test_gradients_stand_side_by_side_whatever_their_order(make):
    report = report_of(make, trained(make, 0, first="right"), trained(make, 1, make.NAN))
    lines = [line.split() for line in render_text(report, width=160).splitlines()]
    assert ["left", "Linear", "grad", "output", "nan", "1.00e+00"] in lines
    assert ["head", "Add", "grad", "output", "5.00e-01", "5.00e-01"] in lines
    assert [
        "abs",
        "max",
        "of",
        "the",
        "outputs",
        "and",
        "gradients",
        "in",
        "batch",
        "2,",
        "rank",
        "by",
        "rank",
    ] in lines


def test_the_frames_of_a_sum_over_ranks_end_with_it(make):
    batches = [trained(make, rank) for rank in range(2)]
    for batch in batches:
        batch.got("left", "Linear", {"weight": make.INF})
        batch.stepped("left", "Linear", {"weight": make.NAN})
    report = report_of(make, *batches)
    assert (report.verdict.rank, report.verdict.phase) == (None, "collective")
    assert [rank.frames[-1].phase for rank in report.ranks] == ["collective", "collective"]


def test_a_mask_is_shown_with_the_call_that_turned_it_into_nan(make):
    batch = make.Batch(0)
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("padding", "Padding", given=[x], returned=[mask])
    batch.call("attend", "Attend", given=[x, mask], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    assert [frame.module for frame in report_of(make, batch).ranks[0].frames] == ["padding", "attend"]


def test_gradients_of_one_module_are_under_one_title_with_their_phase(make):
    frames = trained(make, 0).decoded().frames
    assert frames_text(frames[2:7]).splitlines() == [
        "abs min  abs max  metadata",
        "                  head Add",
        "2.00e+00 2.00e+00 input[0]",
        "3.00e+00 3.00e+00 input[1]",
        "4.00e+00 4.00e+00 output",
        "                   Net",
        "1.00e+00 1.00e+00 input[0]",
        "4.00e+00 4.00e+00 output",
        "                  head Add (backward)",
        "5.00e-01 5.00e-01 grad output",
        "                  left Linear (backward)",
        "1.00e+00 1.00e+00 grad output",
        "1.00e+00 1.00e+00 grad weight",
    ]


def test_two_calls_of_one_module_keep_their_titles(make):
    batch = make.Batch(0)
    for _ in range(2):
        batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    assert frames_text(batch.decoded().frames).count("fc Linear") == 2


def test_shares_that_were_counted_stand_at_the_end_of_a_row(make):
    batch = make.Batch(0)
    lost = batch.tensor(1.0, zeros=0.12, subnormals=0.03)
    none = batch.tensor(1.0, zeros=0.0, subnormals=0.0)
    batch.call("fc", "Linear", given=[none], returned=[lost])
    lines = frames_text(batch.decoded().frames).splitlines()
    assert lines[-2:] == ["1.00e+00 1.00e+00 input[0]", "1.00e+00 1.00e+00 output zeros 12% subnormal 3%"]


def test_a_statistic_that_is_no_share_stands_there_as_a_number(make, monkeypatch):
    monkeypatch.setattr(side_by_side, "SHOWN_STATISTICS", [("headroom", "left", False)])
    batch = make.Batch(0)
    batch.call("fc", "Linear", returned=[batch.tensor(1.0)])
    (frame,) = batch.decoded().frames
    (row,) = frame.rows
    assert frames_text([frame]).splitlines()[-1] == f"1.00e+00 1.00e+00 output left {row.headroom:.2e}"


def test_the_title_of_the_frames_says_forward_only_where_they_are(make):
    report = report_of(make, trained(make, 0, make.NAN))
    assert "Rank 0, batch 2: last 6 frames" in render_text(report)
