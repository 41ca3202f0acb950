"""`make demo`'s command: a real overflow, that nobody put there. Rank and step depend on the CPU and are not pinned."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train_transformer.py")

pytestmark = pytest.mark.slow


def test_the_learning_rate_that_is_too_high_ends_in_a_feed_forward_layer(bench):
    run = bench.gpuwatch("launch", "--nproc-per-node", "2", SCRIPT)

    assert run.code == 4
    verdict = run.verdict
    assert {key: verdict[key] for key in ("kind", "phase", "value", "dtype")} == {
        "kind": "overflow",
        "phase": "forward",
        "value": "+inf",
        "dtype": "float16",
    }
    assert "feed_forward" in verdict["module"]
    assert verdict["batch"] >= 15
    assert verdict["rank"] in (0, 1)
    assert f"`{verdict['module']}`" in verdict["statement"]
    assert verdict["statement"] in " ".join(run.stderr.split())
    series = {each["rank"]: each for each in run.report["history"]["ranks"]}[verdict["rank"]]
    assert series["batches"][-1] == verdict["batch"] and series["abs_max"][-1] is None
    assert len(series["batches"]) >= 5, "how many are looked at depends on how fast they come"
    before = [number for number in series["abs_max"] if number is not None]
    assert before[0] < 100 < before[-1], "it grew"
    telemetry = run.report["telemetry"]
    assert (telemetry["event"], telemetry["trouble"]) == ("the overflow", "")
    assert "memory_used" in {figure["what"] for figure in telemetry["nodes"][0]["figures"]}
    page = (run.cwd / "gpuwatch-runs" / "latest" / "report.html").read_text()
    assert "batch by batch" in page and verdict["module"] in page


def test_the_usual_learning_rate_is_clean(bench):
    run = bench.launch(SCRIPT, args=("--lr", "1e-3", "--steps", "20"))

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert [rank["batch"] for rank in run.report["ranks"]] == [19, 19]
