"""A module that grows is told while the job trains, once, and stands in the report."""

import pytest

pytestmark = pytest.mark.slow


def test_it_is_told_before_the_overflow_and_stands_in_the_report(bench):
    run = bench.launch("growing.py", "--preflight", "off", nproc=1)

    assert (run.code, run.verdict["kind"], run.verdict["module"]) == (4, "overflow", "1")
    lines = [line for line in run.stderr.splitlines() if "outputs grow towards float16's limit of 65504" in line]
    assert len(lines) == 1, "once for a run"
    told, around = run.report["forecasts"]
    assert around["module"] == "", "the root returns what the module has returned"
    assert (told["module"], told["class"], told["dtype"], told["limit"]) == ("1", "Linear", "float16", 65504.0)
    assert told["ranks"] and told["rank"] in told["ranks"]
    lead = run.verdict["batch"] - told["batch"]
    assert lead >= 5
    assert told["earliest"] - 2 <= lead <= told["latest"] + 2
    (insight,) = [insight for insight in run.report["insights"] if insight["kind"] == "growth"]
    assert "`1` was at" in insight["text"] and "`1` overflowed in batch" in insight["text"]
    folder = run.cwd / "gpuwatch-runs" / "latest"
    assert "grew towards float16" in " ".join((folder / "report.txt").read_text().split())
    assert "grew towards float16" in (folder / "report.html").read_text()
    assert "outputs grow towards float16" in (folder / "logs" / "collector.log").read_text()
