"""Processes that are no rank, where a job is looked at: the picture, top, the metrics, and the export."""

from __future__ import annotations

import pytest
from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.views.frame_export import export_rows
from gpuwatch.collector.views.metrics_endpoint import OwnNumbers, text_of
from gpuwatch.collector.views.snapshot import MOST_PROCESSES, view_of
from gpuwatch.collector.views.top_model import TopModel, plain
from gpuwatch.core.identity import number_of_process
from gpuwatch.core.wire.messages import encode
from gpuwatch.core.wire.view import decode_view


@pytest.fixture
def folded(make):
    """Rank 0 trains. Process 4242 has overflowed, and many others have called a module. One has become rank 0."""
    found = FactFold()
    lone = number_of_process(4242, "h0")
    batch = make.Batch(lone, batch=7, page=7)
    x, y = batch.tensor(), batch.tensor(make.INF)
    batch.call("fc", "Linear", given=[x], returned=[y])
    states = [make.state(0, batch=3, pid=77), make.state(lone, batch=7, pid=4242)]
    states += [make.state(number_of_process(pid, "h0"), batch=1, pid=pid) for pid in (77, *range(5000, 5030))]
    bodies = [make.hello(nproc=0), *batch.messages(), make.NodeBeat(states, {}, 1)]
    for n, body in enumerate(bodies, 1):
        found.add("a0", n, body)
    return found


@pytest.fixture
def view(folded):
    seen = view_of(folded.as_it_stands(), "run", 5)
    assert decode_view(encode(seen)) == seen
    return seen


def test_the_one_that_has_overflowed_comes_first_and_the_rest_is_counted(view):
    assert [rank.rank for rank in view.ranks] == [0]
    assert len(view.processes) == MOST_PROCESSES
    assert [process.overflow for process in view.processes[:2]] == [True, False]
    assert view.more_processes == 31 - MOST_PROCESSES
    assert [event.text for event in view.events] == ["process 4242 (no rank): +inf in output of `fc`, batch 7"]
    assert view.anomalies_by_value == {"+inf": 1}
    assert view.events_by_kind["anomaly"] == 1


def test_top_shows_them_behind_the_ranks(view):
    model = TopModel()
    model.see(view)
    lines = plain(model.screen(100), 64).splitlines()
    at = next(n for n, line in enumerate(lines) if "pid 4242" in line)
    assert lines[at - 1].split()[0] == "0", "rank 0 is above"
    assert "OVERFLOW pid 4242" in lines[at]
    assert any(f"{31 - MOST_PROCESSES} more processes without a rank" in line for line in lines)


def test_the_metrics_have_the_series_of_a_rank_for_them(view):
    text = text_of(view, OwnNumbers()).decode()
    assert 'gpuwatch_rank_batches_total{host="h0",rank="pid 4242"} 8.0' in text
    assert 'gpuwatch_rank_state{host="h0",rank="pid 4242",state="overflow"} 1.0' in text
    assert 'gpuwatch_ranks{state="overflow"} 0.0' in text, "it is no rank"


def test_the_export_has_their_frames(folded):
    rows = [row for row in export_rows(folded.facts(), "x") if row.table == "frames"]
    assert {(row.rank, row.process) for row in rows} == {(None, 4242)}
    assert [row.role for row in rows] == ["input[0]", "output"]
    assert list(export_rows(folded.facts(), "x", ["frames"], [0])) == []
