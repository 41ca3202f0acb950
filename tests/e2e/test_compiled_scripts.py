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
    assert watched.code == {"clean": 0, "unknown": 6}[watched.verdict["kind"]]

    expected = json.loads((bench.cwd / "alone.json").read_text())
    found = json.loads((bench.cwd / "watched.json").read_text())
    assert len(expected) > 12
    assert [name for name in expected if found[name] != expected[name]] == []
    views = compiled_views()
    told = [line for line in watched.stderr.splitlines() if line.endswith("compiled modules are not looked into")]
    assert told == ([f"gpuwatch: {views.missing}"] if views.missing else [])
    if views.rows:
        assert views.missing[1:] in watched.verdict["statement"]
        assert watched.verdict["kind"] == "clean"
    else:  # nothing was seen of a model that a compiled function calls
        assert "not looked into" in watched.verdict["statement"]


@pytest.mark.slow
def test_a_backward_that_is_compiled_as_a_whole_has_the_same_bits(bench):
    """Compiled autograd, as of torch 2.13: a traced hook that returned None ended the run."""
    name = "the_backward_compiled"
    alone = bench.torchrun("--nproc-per-node", "1", bench.script(SCRIPT), str(bench.cwd / "alone.json"), name)
    assert alone.code == 0
    watched = bench.launch(SCRIPT, "--on-overflow", "continue", nproc=1, args=(str(bench.cwd / "watched.json"), name))
    assert watched.code == 0
    expected = json.loads((bench.cwd / "alone.json").read_text())[name]
    found = json.loads((bench.cwd / "watched.json").read_text())[name]
    assert (found["error"], found["bits"]) == ("", expected["bits"])
