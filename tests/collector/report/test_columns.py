"""Numbers of ranks beside each other: as many columns as the width has room for, and no number is cut."""

from __future__ import annotations

import re

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.text_report import render_text


def text_of(make, ranks, width, module="encoder.layers.0.self_attention.output.dense"):
    bodies = [make.hello(nproc=ranks)]
    for rank in range(ranks):
        batch = make.Batch(rank)
        x, h = batch.tensor(2.91e13), batch.tensor(make.INF if rank == 1 else 2.91e13)
        batch.call(module, "Linear", given=[x], returned=[x], weights={"weight": batch.tensor(0.5)})
        batch.call(f"{module}.head", "Linear", given=[x], returned=[h])
        bodies += batch.messages()
    report = build_report(
        fold(("a0", n, body) for n, body in enumerate(bodies, 1)), run_id="x", started=None, ended=None
    )
    return render_text(report, width=width)


def columns_of(text):
    """The numbers of the ranks that have a column, and the lines of the table."""
    lines = text.splitlines()
    (at,) = [at for at, line in enumerate(lines) if line.startswith("abs max of the outputs")]
    return [int(number) for number in re.findall(r"rank (\d+)", lines[at + 1])], lines[at + 1 : lines.index("", at)]


@pytest.mark.parametrize(("width", "shown"), [(80, 6), (100, 8), (160, 8)])
def test_a_narrow_terminal_shows_fewer_ranks_and_whole_numbers(make, width, shown):
    ranks, table = columns_of(text_of(make, 8, width))
    assert ranks[0] == 1 and len(ranks) == shown
    words = " ".join(table).split()
    assert words.count("2.91e+13") == 2 * shown - 1
    assert max(map(len, table)) <= width
    assert not any("..." in word or "…" in word for word in words)


def test_ranks_without_a_column_are_counted_and_the_way_to_them_is_told(make):
    _, table = columns_of(text_of(make, 8, 80))
    assert table[-1] == "2 more ranks: in a wider terminal, or gpuwatch report --rank N"
    assert "more ranks" not in text_of(make, 8, 160)
