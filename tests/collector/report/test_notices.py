"""What a report says beside the verdict: values near trouble, skipped steps, waived rows, skipped batches."""

from __future__ import annotations

import json
import random

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import RunReport, to_json
from gpuwatch.collector.report.notices_text import notice_lines
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.across_ranks import PassedTensor
from gpuwatch.core.events.alarms import AbsorbedValue, IgnoredAlarm, MaskReturned, RangeWarning, ScalerSkip
from gpuwatch.core.events.own_limits import WatchChoice
from gpuwatch.core.wire.messages import EventMessage


def messages(bodies):
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


def report_of(bodies) -> RunReport:
    return build_report(fold(messages(bodies)), run_id="run", started=None, ended=None)


def text_of(report, **how) -> str:
    return " ".join(render_text(report, width=200, **how).split())


def near(make, rank=0, *, headroom=0.25, module="up", role="output", batch=3):
    place = make.where(rank, batch=batch)
    return EventMessage(
        RangeWarning(
            place, "near overflow", module, "Linear", "forward", role, "float16", 60000.0, headroom, None, None
        )
    )


def underflow(make, rank=0, *, subnormals=0.5, zeros=0.1, module="head"):
    place = make.where(rank, batch=1)
    return EventMessage(
        RangeWarning(
            place, "underflow", module, "Linear", "backward", "grad weight", "float16", 1e-7, 39.0, zeros, subnormals
        )
    )


def skip(make, rank, scale, in_a_row, *, batch=0):
    place = make.where(rank, batch=batch, time_ns=1_000 + batch)
    return EventMessage(ScalerSkip(place, scale, in_a_row, "lower", "Linear", "grad output", "+inf"))


def hidden(make, rank, *, pattern="probe*", module="probe", batch=0):
    return EventMessage(IgnoredAlarm(make.where(rank, batch=batch), pattern, module, "output", "+inf"))


def run(make, *bodies, ranks=2, batches=8, **state):
    """A clean run with these events."""
    beat = make.NodeBeat([make.state(rank, step=8, batch=7, **state) for rank in range(ranks)], {})
    ends = [body for rank in range(ranks) for body in make.finished(rank, batch=batches - 1, last=state)]
    return [make.hello(nproc=ranks), *bodies, beat, *ends, make.NodeBye("ok")]


# -- near overflow and underflow ----------------------------------------------------------------------------------


def test_a_warning_leaves_the_run_clean_and_is_mentioned(make):
    report = report_of(run(make, near(make, 1)))
    assert (report.verdict.kind, report.verdict.certainty) == ("clean", "established")
    assert report.verdict.statement == (
        "No overflow: 2 ranks, 8 batches, every watched tensor finite. Closest to trouble: rank 1, near overflow: "
        "output of up (Linear) in batch 3: abs max 6.00e+04, 0.2 powers of two below float16's limit."
    )


def test_warnings_in_the_report_have_the_fields_of_the_events(make):
    (warning,) = json.loads(to_json(report_of(run(make, underflow(make, 1)))))["ranks"][1]["warnings"]
    assert warning == {
        "kind": "underflow", "module": "head", "class": "Linear", "phase": "backward", "role": "grad weight",
        "dtype": "float16", "abs_max": 1e-7, "headroom": 39.0, "zeros": 0.1, "subnormals": 0.5, "batch": 1, "step": 0,
    }  # fmt: skip


def test_the_worst_warning_comes_first(make):
    bodies = [near(make, 0, headroom=0.9, module="a"), underflow(make), near(make, 0, headroom=0.1, module="b")]
    report = report_of(run(make, *bodies))
    assert [warning["module"] for warning in report.ranks[0].warnings] == ["b", "a", "head"]
    assert "output of b (Linear)" in report.verdict.statement
    assert report.verdict.statement.endswith(", and 2 more.")


def test_a_table_of_warnings_shows_eight_and_counts_the_rest(make):
    bodies = [near(make, 0, module=f"m{n:02}", headroom=n / 20) for n in range(11)]
    text = text_of(report_of(run(make, *bodies, warned=40)), warnings=True)
    assert "Rows close to trouble" in text
    assert "m07 Linear" in text
    assert "m08 Linear" not in text
    assert "3 more from other places in report.json" in text
    assert "80 such rows in all batches" in text


def test_underflow_is_told_in_shares(make):
    text = text_of(report_of(run(make, underflow(make, subnormals=0.5, zeros=0.001))))
    assert "50% subnormal, <1% zeros in float16" in text


def test_a_warning_stands_beside_an_overflow_too(make):
    batch = make.Batch(0, batch=4)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    report = report_of([make.hello(nproc=1), near(make, 0), *batch.messages()])
    assert report.verdict.kind == "overflow"
    assert "Close to trouble - outputs of `up` came close to float16's limit" in text_of(report)


def test_a_mask_is_an_exception_of_a_clean_statement(make):
    masks = [EventMessage(MaskReturned(make.where(1, batch=n), f"mask{n}", "Mask", "output")) for n in (3, 0)]
    statement = report_of(run(make, *masks)).verdict.statement
    assert statement.endswith(
        "every watched tensor finite, except for -inf alone, as in masks (first: output of `mask0` (Mask))."
    )


def test_a_mask_that_a_module_was_handed_is_told_from_the_last_batches(make):
    batch = make.Batch(0, batch=7)
    x = batch.tensor()
    batch.call("attn", "Attention", given=[x, batch.tensor(-make.INF)], returned=[x])
    statement = report_of(run(make, *batch.messages(), ranks=1)).verdict.statement
    assert statement.endswith("finite, except for -inf alone, as in masks (such as input[1] of `attn` (Attention)).")


# -- GradScaler ---------------------------------------------------------------------------------------------------


def test_skipped_steps_are_counted_and_told(make):
    bodies = [skip(make, rank, 2.0**-n, n + 1, batch=n) for n in range(4) for rank in range(2)]
    report = report_of(run(make, *bodies, scaler_skips=4))
    assert report.verdict.kind == "clean"
    assert "except for gradients whose step a GradScaler skipped on ranks 0 and 1" in report.verdict.statement
    rank = report.ranks[1]
    assert (rank.scaler_skips, rank.scaler["last_scale"], rank.scaler["in_a_row"]) == (4, 0.125, 4)
    assert (rank.scaler["module"], rank.scaler["role"], rank.scaler["batch"]) == ("lower", "grad output", 0)
    first = "first for +inf in grad output of lower, the last at scale 0.125"
    assert f"GradScaler skipped 4 steps on ranks 0 and 1 (expected, {first})" in text_of(report)


def test_without_a_beat_the_events_are_counted(make):
    report = report_of([make.hello(nproc=1), skip(make, 0, 2.0, 1), skip(make, 0, 1.0, 2, batch=1), hidden(make, 0)])
    assert (report.ranks[0].scaler_skips, report.ranks[0].ignored) == (2, 1)


def test_a_rank_without_a_scaler_has_none(make):
    assert report_of(run(make)).ranks[0].scaler is None


# -- what led nowhere ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "by", "said"),
    [
        ("", "attn", "made from a mask of -inf and removed in `attn`"),
        ("taken away", "attn", "removed in `attn`"),
        ("taken away", "", "removed in the root module"),
        ("no gradient", "", "which reached no output and got no gradient"),
        ("not trained", "", "which no optimizer holds and no backward reached"),
    ],
)
def test_what_led_nowhere_is_counted_and_told_with_its_place(make, why, by, said):
    told = EventMessage(AbsorbedValue(make.where(0, batch=2), "attn.log", "Log", "output", "nan", "float32", by, why))
    report = report_of(run(make, told, absorbed=3))

    assert (report.verdict.kind, report.verdict.certainty) == ("clean", "established")
    first = "had no effect (first: nan in output of `attn.log` (Log))" if why else "of nan from masks"
    assert f"except for 6 tensors {'that ' if why else ''}{first}" in report.verdict.statement
    assert report.ranks[0].absorbed_first[0]["why"] == why
    assert f"absorbed: nan in output of `attn.log` (Log), {said}, first in batch 2" in text_of(report)


def test_what_passed_between_ranks_is_an_exception_of_clean(make):
    place = make.where(0, batch=2)
    told = [EventMessage(PassedTensor(place, "all_reduce", "0", "0-1", 7, -1, 0, out, "+inf")) for out in (False, True)]
    report = report_of(run(make, *told[::-1]))

    assert (report.verdict.kind, report.verdict.certainty) == ("clean", "established")
    first = "+inf that rank 0 put into all_reduce in batch 2 (and 1 more such tensor)"
    assert f"every watched tensor finite, except for {first}." in report.verdict.statement


@pytest.mark.parametrize(("why", "kind"), [("not trained", "clean"), ("", "overflow")])
def test_what_a_rank_has_found_to_lead_nowhere_is_inferred_from_no_page(make, why, kind):
    """A metric under no_grad: its page looks like that of a model."""
    batch = make.Batch(0, batch=2)
    batch.call("", "Metric", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    batch.anomaly = None
    told = EventMessage(AbsorbedValue(make.where(0, batch=2), "", "Metric", "output", "+inf", "float32", "", why))
    report = report_of(run(make, told, *batch.messages(), absorbed=1))

    assert report.verdict.kind == kind


# -- --ignore -----------------------------------------------------------------------------------------------------


def test_hidden_rows_are_counted_and_told(make):
    report = report_of(run(make, hidden(make, 1, batch=2), hidden(make, 0, batch=5), ignored=6))
    assert (report.verdict.kind, report.ranks[0].ignored) == ("clean", 6)
    assert "except for 12 rows that --ignore hides" in report.verdict.statement
    assert report.ranks[1].hidden == [
        {"pattern": "probe*", "module": "probe", "role": "output", "value": "+inf", "batch": 2}
    ]
    line = "waived by --ignore 'probe*': 12 rows, first +inf in output of probe, rank 1, batch 2"
    assert line in text_of(report)


def test_several_rules_are_told_apart(make):
    report = report_of(run(make, hidden(make, 0), hidden(make, 0, pattern="x", module="x"), ignored=3))
    text = text_of(report)
    assert "waived by --ignore 'x': first +inf in output of x" in text
    assert "waived by --ignore: 6 rows in all" in text


# -- skipped batches ---------------------------------------------------------------------------------------------


def test_a_run_of_which_only_some_batches_were_looked_at_does_not_claim_the_others(make):
    report = report_of(run(make, batches=100, batches_skipped=80))
    assert report.verdict.statement == (
        "No overflow seen: 2 ranks, 100 batches (only one in 5 was inspected), every inspected tensor was finite."
    )
    assert "every watched tensor finite" not in text_of(report)
    assert report.verdict.next == ["Inspect every batch with --every 1."]
    assert report.verdict.certainty == "supported", "what is sampled is never established"
    assert report.ranks[0].batches_skipped == 80


def test_the_text_says_that_batches_were_left_out(make):
    assert "only one batch in 5 was inspected; 80 were skipped" in text_of(
        report_of(run(make, batches=100, batches_skipped=80))
    )


def test_what_auto_has_chosen_is_one_line_for_all_ranks(make):
    chosen = [WatchChoice(make.where(rank, batch=52), every, cost, 0.02) for rank, every, cost in CHOSEN]
    report = report_of(run(make, *map(EventMessage, chosen), batches=100, batches_skipped=80))
    lines = [line for line in notice_lines(report) if "--every auto" in line]
    assert lines == [
        "--every auto, rank 1: watching every step cost 20 % of its time (give or take 2 %): one step in 16 is watched "
        "whole from batch 52 on; of 2 ranks this is the one where it cost most [GW234]"
    ]
    assert [rank.watch_choices[0]["every"] for rank in report.ranks] == [8, 16]


CHOSEN = [(0, 8, 0.14), (1, 16, 0.2)]


def test_batches_of_several_roots_are_not_made_into_a_ratio(make):
    assert "(20 were skipped)" in report_of(run(make, batches=8, batches_skipped=20)).verdict.statement


def test_what_was_left_out_before_a_restart_is_said(make):
    before = [*make.finished(0, batch=3, attempt=0, last={"batches_skipped": 2})]
    again = [*make.finished(0, batch=3, attempt=1)]

    verdict = report_of([make.hello(nproc=1), *before, *again, make.NodeBye("ok")]).verdict
    assert (verdict.kind, "only one in 2 was inspected" in verdict.statement) == ("clean", True)


# -- the fold -----------------------------------------------------------------------------------------------------


def test_notices_do_not_depend_on_order_or_duplicates(make):
    bodies = run(
        make,
        *(near(make, rank, module=f"m{n}") for n in range(3) for rank in range(2)),
        *(skip(make, rank, 4.0 / (n + 1), n + 1, batch=n) for n in range(3) for rank in range(2)),
        hidden(make, 0),
        hidden(make, 0, module="probe.2"),
        ignored=2,
    )
    expected = to_json(report_of(bodies))
    shuffled = messages([*bodies, *bodies[1:8]])
    for seed in range(5):
        random.Random(seed).shuffle(shuffled)
        again = build_report(fold(shuffled), run_id="run", started=None, ended=None)
        assert to_json(again) == expected


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_beats_from_the_same_place_the_one_that_counted_more_stays(make, first):
    beats = [make.NodeBeat([make.state(0, ignored=ignored)], {}) for ignored in (1, 5)]
    facts = fold(messages([beats[first], beats[1 - first]]))
    assert facts.ranks[0, 0].hidden_rows == 5


def test_of_two_anomalies_the_one_that_was_first_in_time_counts(make):
    """Pipeline: the backward of batch 4 runs when the forward of batch 5 is done."""
    later = make.Batch(0, batch=4, page=4, time_ns=2_000)
    later.call("fc", "Linear", given=[later.tensor()], returned=[later.tensor(make.NAN)])
    first = make.Batch(0, batch=5, page=5, time_ns=1_000)
    first.call("fc", "Linear", given=[first.tensor()], returned=[first.tensor(make.NAN)])
    facts = fold(messages([*later.messages(), *first.messages()]))
    assert [anomaly.where.batch for anomaly in facts.ranks[0, 0].anomalies] == [5, 4]


def test_groups_without_room_are_told(make):
    states = [make.state(0, groups_not_shown=4), make.state(1, groups_not_shown=4), make.state(2)]
    text = text_of(report_of([make.hello(nproc=3), make.NodeBeat(states, {})]))
    assert "4 process groups of ranks 0 and 1 did not fit in the table of groups" in text
