"""`benchmarks/collector.py` with few ranks: what it measures comes out right, however long it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "collector.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_every_page_arrives_and_every_overflow_is_named(ranks, tmp_path):
    options = ["--ranks", ranks, "--pages", 3, "--rate", 0, "--frames", 40, "--anomalies", 4]
    paths = ["--json", tmp_path / "figures.json", "--folder", tmp_path]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *map(str, [*options, *paths])], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["ranks"], figures["pages"], figures["dropped"]) == (ranks, 3 * ranks, 0)
    assert figures["latencies"] == 4
    last = 3 * (ranks // 4)
    assert figures["verdict"].startswith(f"Rank {last} ")
    assert "overflowed first: +inf in the output of `encoder.layers.2.block.4` (Linear)" in figures["verdict"]
    assert f"| {ranks} |" in done.stdout


@pytest.mark.slow
@pytest.mark.sample(1)
def test_with_a_stopped_collector_no_event_is_lost_and_the_counters_add_up(tmp_path):
    options = ["--ranks", 16, "--pages", 12, "--rate", 6, "--frames", 40, "--anomalies", 1, "--stopped", 0.5]
    paths = ["--json", tmp_path / "figures.json", "--folder", tmp_path]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *map(str, [*options, *paths])], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = json.loads((tmp_path / "figures.json").read_text())
    assert figures["events_stored"] == figures["events_sent"] == 2 * 16 + 3
    assert figures["recorded"] == figures["pages_stored"] + figures["thinned"] + figures["dropped"] == 15 * 16


def test_a_count_that_is_no_multiple_of_a_node_is_refused():
    done = subprocess.run([sys.executable, BENCHMARK, "--ranks", "12"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "expected multiples of 8 from 8 to 8192, found 12" in done.stderr
