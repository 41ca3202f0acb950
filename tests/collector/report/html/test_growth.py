"""The forecast in the chart of the verdict's module."""

from __future__ import annotations

import re

import pytest
from gpuwatch.collector.report.html.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, over_the_batches
from gpuwatch.collector.report.html.page import render_html
from msgspec.structs import replace


def told(report, **changed):
    """The same report with another forecast."""
    return replace(report, forecasts=[replace(report.forecasts[0], **changed)])


def points(path):
    return [tuple(map(float, point)) for point in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


@pytest.mark.parametrize(
    ("earliest", "latest", "where"), [(18, 40, "in"), (24, 40, "before"), (3, 21, "after"), (22, 22, "in")]
)
def test_it_is_said_what_came_true(report_of, earliest, latest, where):
    chart = over_the_batches(told(report_of("growing"), earliest=earliest, latest=latest))
    assert chart.growth.text == (
        f"forecast made in batch -22 of rank 1: the output passes the limit in batch 4 ({earliest - 22} to "
        f"{latest - 22}); it did in batch 0, {where} that range"
    )
    assert chart.growth.label == "forecast in batch -22"


def test_it_begins_on_the_line_and_ends_at_the_limit(report_of):
    chart = over_the_batches(report_of("growing"))
    begin, end = points(chart.growth.line)
    named = points(chart.lines[-1].path)
    on_the_line = next(y for x, y in named if x == pytest.approx(begin[0], abs=0.2))
    assert begin == chart.growth.start and begin[1] == pytest.approx(on_the_line, abs=1)
    assert end[1] == chart.limit_y


@pytest.mark.parametrize("later", [(5, 3, 8), (26, 18, 40), (60, 50, 90), (600, 18, 5000), (1, 1, 2)])
def test_nothing_of_it_leaves_the_chart(report_of, later):
    after, earliest, latest = later
    chart = over_the_batches(told(report_of("growing"), after=after, earliest=earliest, latest=latest))
    for x, y in [*points(chart.growth.line), *points(chart.growth.band)]:
        assert LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM
    first, last = chart.lines[-1].path, chart.marks[-1][0]
    assert points(first)[0][0] == LEFT and last >= LEFT + (WIDTH - LEFT - RIGHT) / 1.26, "at most a quarter more"


@pytest.mark.parametrize(
    "changed",
    [{"module": "encoder.fc1"}, {"dtype": "bfloat16"}, {"batch": 0}, {"batch": 7}, {"batch": -1000}],
)
def test_a_forecast_of_something_else_or_of_another_time_is_not_drawn(report_of, changed):
    report = told(report_of("growing"), **changed)
    assert over_the_batches(report).growth is None
    assert 'class="growth' not in render_html(report)


def test_a_page_without_a_forecast_has_nothing_of_it(report_of, page_of):
    without = replace(report_of("growing"), forecasts=[])
    assert 'class="growth' not in render_html(without)
    assert page_of("growing").count('class="growth') == 4
