"""The upright axis of the page's chart: its ends hold the values, and its ticks can be read."""

from __future__ import annotations

import doctest
import math

import pytest
from gpuwatch.collector.report.html import value_axis
from gpuwatch.collector.report.html.chart import BOTTOM, HEIGHT, TOP, over_the_batches
from gpuwatch.collector.report.html.value_axis import axis_of
from msgspec.structs import replace

SERIES = {
    "a loss that falls": [2.3, 2.1, 1.9],
    "a loss that stays": [2.3, 2.3],
    "within a decade, without a power of ten": [3.0, 8.0],
    "decades": [1e-3, 5.0, 4e4],
    "just decades": [1.0, 40.0],
    "nearly the dtype's limit": [60_000.0, 65_504.0],
    "with zeros": [0.0, 2.0, 3.0],
    "with zeros, over decades": [0.0, 1e-3, 3.0],
    "a small difference": [123_456.0, 123_457.0],
    "small": [7e-9, 9e-9],
    "float64's largest": [1.6e308, 1.7e308],
    "float64's smallest": [5e-324],
    "all that there is": [5e-324, 1.7e308],
}


@pytest.mark.parametrize("values", SERIES.values(), ids=SERIES)
def test_the_values_are_on_it_in_their_order(values):
    axis = axis_of(values, None)
    shares = [axis.share(value) for value in sorted(values)]

    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert shares[-1] > shares[0] or len(set(values)) == 1
    assert axis.is_logarithmic == (len(values) == 1 or max(values) / min(v for v in values if v) > 10**1.5)


@pytest.mark.parametrize("values", SERIES.values(), ids=SERIES)
def test_it_has_from_two_to_eight_ticks_whose_labels_are_their_values(values):
    axis = axis_of(values, None)
    ticks = axis.ticks()

    assert 2 <= len(ticks) <= 8
    assert len({text for _, text in ticks}) == len(ticks), "each has a label of its own"
    assert all(math.isclose(float(text), value, rel_tol=1e-6, abs_tol=5e-324) for value, text in ticks)
    assert all(0 <= axis.share(value) <= 1 for value, _ in ticks)
    assert max(len(text) for _, text in ticks) <= 9


def test_without_a_number_above_zero_there_is_none():
    assert axis_of([], 65504.0) is None
    assert axis_of([0.0, 0.0], None) is None


def test_its_examples():
    assert doctest.testmod(value_axis).failed == 0


def test_a_loss_that_falls_and_becomes_nan_is_a_line_over_the_whole_height_with_a_mark(report_of):
    """nan and inf are marked above it, and do not lengthen the axis."""
    report = report_of("growing")
    losses = [2.3, 2.2, 2.05, 1.9, None]
    named = replace(report.history.ranks[0], rank=report.verdict.rank, batches=[-4, -3, -2, -1, 0], abs_max=losses)
    history = replace(report.history, module="loss", dtype="float32", limit=3.4e38, ranks=[named])
    chart = over_the_batches(replace(report, history=history, forecasts=[]))

    assert [text for _, text in chart.y_ticks] == ["1.9", "2.0", "2.1", "2.2", "2.3"]
    heights = [float(point.split()[1].split("h")[0]) for point in chart.lines[0].path[1:].split("L")]
    assert len(heights) == 4 and heights == sorted(heights)
    assert heights[-1] - heights[0] > 0.8 * (HEIGHT - TOP - BOTTOM)
    assert len(chart.marks) == 1 and chart.limit_y is None
