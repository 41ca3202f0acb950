"""Scripts that compile their model do the same with and without us, with whatever torch is installed."""

from __future__ import annotations

import json

import pytest
from gpuwatch.worker.compile.region_parts import compiled_views

pytestmark = pytest.mark.slow

SCRIPT = "compiled_scripts.py"
PLAIN = ("--preflight", "off")


@pytest.mark.sample(1, of="compiled scripts")
@pytest.mark.parametrize("late", [pytest.param({}, id="host"), pytest.param({"GPUWATCH_LATE_DEVICE": "0"}, id="late")])
def test_no_script_notices_us_and_what_this_torch_hides_is_told(bench, late):
    arguments = ("--nproc-per-node", "1", bench.script(SCRIPT), str(bench.cwd / "alone.json"))
    alone = bench.torchrun(*arguments, TORCHINDUCTOR_COMPILE_THREADS="1")  # else processes that each import torch
    assert alone.code == 0
    file = str(bench.cwd / "watched.json")
    watched = bench.launch(SCRIPT, *PLAIN, "--on-overflow", "continue", nproc=1, args=(file,), **late)
    assert watched.code == {"clean": 0, "unknown": 6}[watched.verdict["kind"]]

    expected = json.loads((bench.cwd / "alone.json").read_text())
    found = json.loads((bench.cwd / "watched.json").read_text())
    assert len(expected) > 12
    assert [name for name in expected if found[name] != expected[name]] == []
    views = compiled_views()
    told = [line for line in watched.stderr.splitlines() if "compiled modules are not inspected" in line]
    assert told == ([f"gpuwatch: {views.missing} [GW515]"] if views.missing else [])
    if views.rows:
        assert views.missing[1:] in watched.verdict["statement"]
        assert watched.verdict["kind"] == "clean"
    else:  # nothing was seen of a model that a compiled function calls
        assert "not inspected" in watched.verdict["statement"]


@pytest.mark.sample(1, of="compiled autograd")
@pytest.mark.parametrize("late", [pytest.param({}, id="host"), pytest.param({"GPUWATCH_LATE_DEVICE": "0"}, id="late")])
def test_gradients_that_compiled_autograd_hides_are_told_and_found_where_the_optimizer_reads_them(bench, late):
    said = "gradients of a backward that compiled autograd runs are not inspected"
    args = (str(bench.cwd / "watched.json"), "the_backward_alone_compiled")
    clean = bench.launch(SCRIPT, *PLAIN, nproc=1, args=args, **late)
    assert clean.code == 0
    assert clean.stderr.count(f"gpuwatch: {said} [GW") == 1
    assert f"{said[0].upper()}{said[1:]}." in clean.verdict["statement"]

    bad = bench.launch("compiled_autograd_nan.py", *PLAIN, nproc=1, **late)
    verdict = bad.verdict
    assert (bad.code, verdict["kind"], verdict["batch"]) == (4, "overflow", 1)
    assert " grad" in verdict["statement"]
    assert verdict["certainty"] != "established"
