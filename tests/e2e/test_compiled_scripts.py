"""Scripts that compile their model do the same with and without us, with whatever torch is installed."""

from __future__ import annotations

import json

import pytest
from gpuwatch.worker.compile.views import compiled_views

pytestmark = pytest.mark.slow

SCRIPT = "compiled_scripts.py"


@pytest.mark.sample(1, of="compiled scripts")
@pytest.mark.parametrize("late", [pytest.param({}, id="host"), pytest.param({"GPUWATCH_LATE_DEVICE": "0"}, id="late")])
def test_no_script_notices_us_and_what_this_torch_hides_is_told(bench, late):
    alone = bench.torchrun("--nproc-per-node", "1", bench.script(SCRIPT), str(bench.cwd / "alone.json"))
    assert alone.code == 0
    file = str(bench.cwd / "watched.json")
    watched = bench.launch(SCRIPT, "--on-overflow", "continue", nproc=1, args=(file,), **late)
    assert watched.code == 0

    expected = json.loads((bench.cwd / "alone.json").read_text())
    found = json.loads((bench.cwd / "watched.json").read_text())
    assert len(expected) > 12
    assert [name for name in expected if found[name] != expected[name]] == []
    missing = compiled_views().missing
    assert watched.stderr.count(f"gpuwatch: {missing}\n" if missing else "are not looked into\n") == (missing != "")
    assert missing[1:] in watched.verdict["statement"]
    assert (watched.report["ranks"][0]["faults"], watched.verdict["kind"]) == ([], "clean")
