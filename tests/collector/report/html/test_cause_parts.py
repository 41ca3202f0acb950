"""The batch's samples as a strip, and the trials of a cause as a table."""

from __future__ import annotations

import pytest
from gpuwatch.collector.report.html.cause_parts import sample_strip, trial_rows
from gpuwatch.collector.report.verdict import OverflowCause
from gpuwatch.core.events.alarm_evidence import CauseTrial, OddSamples


def cause(size=4, indices=(2,), before=1.0, trials=()):
    odd = OddSamples("", "input[0]", list(indices), size, "large", 3.28e4, 1.0, before)
    return OverflowCause("data", "established", "row 2 is large", [], list(trials), odd)


def test_the_rows_that_stand_out_are_marked_with_what_is_recorded_of_them():
    strip = sample_strip(cause())
    assert strip.title == "4 rows of this batch, input[0]"
    assert strip.cells[2] == (2, "odd", "row 2: abs max 3.28e+04")
    assert strip.cells[:2] == [(row, "", f"row {row}: abs max at most 1.00e+00") for row in range(2)]
    assert strip.description == (
        "row 2: abs max 3.28e+04; the others: abs max at most 1.00e+00; the batches before: at most 1.00e+00"
    )


def test_a_long_batch_is_told_without_a_strip_and_a_cause_without_samples_has_none():
    strip = sample_strip(cause(size=4096, indices=(7, 8, 9), before=None))
    assert strip.cells == [] and strip.description.startswith("rows 7") and "before" not in strip.description
    assert sample_strip(None) is None
    assert sample_strip(OverflowCause("domain", "established", "of a log")) is None


@pytest.mark.parametrize(
    ("trial", "row"),
    [
        (CauseTrial("forward", "nothing", "+inf"), ("the forward", "nothing", "+inf")),
        (
            CauseTrial("operation", "float32", "finite", 2.8e8),
            ("the operation alone", "computed in float32", "finite, abs max 2.80e+08"),
        ),
        (
            CauseTrial("forward", "samples", note="it was compiled"),
            ("the forward", "samples that stand out replaced by another", "did not run: it was compiled"),
        ),
    ],
)
def test_a_trial_is_a_row_of_what_ran_what_was_changed_and_what_came_out(trial, row):
    assert trial_rows(cause(trials=[trial])) == [row]
    assert trial_rows(None) == []
