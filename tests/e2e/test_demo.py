"""`make demo`'s command: a real overflow in fp16, of a sample that nobody has scaled."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train_notes.py")

pytestmark = pytest.mark.slow


def test_the_sample_that_was_not_scaled_is_named(bench):
    run = bench.gpuwatch("launch", "--nproc-per-node", "2", SCRIPT)

    assert run.code == 4
    verdict = run.verdict
    right = {
        "kind": "overflow",
        "certainty": "established",
        "rank": 1,
        "batch": 20,
        "module": "spectrum",
        "phase": "forward",
        "value": "+inf",
        "dtype": "float16",
    }
    assert {key: verdict[key] for key in right} == right
    assert any("return re * re + im * im" in why and "all in index 2 of dim 0" in why for why in verdict["evidence"])
    assert verdict["statement"] in " ".join(run.stderr.split())
    series = {each["rank"]: each for each in run.report["history"]["ranks"]}[1]
    assert series["batches"][-1] == 20 and series["abs_max"][-1] is None
    assert len(series["batches"]) >= 5, "how many are looked at depends on how fast they come"
    assert all(0 < number < 1 for number in series["abs_max"][:-1]), "it did not grow"
    telemetry = run.report["telemetry"]
    assert (telemetry["event"], telemetry["trouble"]) == ("the overflow", "")
    assert "memory_used" in {figure["what"] for figure in telemetry["nodes"][0]["figures"]}
    page = (run.cwd / "gpuwatch-runs" / "latest" / "report.html").read_text()
    assert "batch by batch" in page and "spectrum" in page


def test_scaled_it_is_clean(bench):
    run = bench.launch(SCRIPT, args=("--normalize", "--steps", "30"))

    assert run.code == 0
    assert (run.verdict["kind"], run.verdict["certainty"]) == ("clean", "established")
    assert [rank["batch"] for rank in run.report["ranks"]] == [29, 29]
