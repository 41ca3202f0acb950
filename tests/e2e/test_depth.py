"""A model may be nested, and a script may recurse, as deep as under torchrun."""

import json
import sys

import pytest

pytest.importorskip("gpuwatch.worker.native.recursion", reason="without it hooks take frames (docs/limits.md)")
NEARLY = 8
"""A module may find so many frames more: what a hook of ours takes at once."""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["launch", "run"])
def test_it_is_as_deep_as_without_gpuwatch(bench, way):
    script = bench.script("deep.py")
    command = (way, "--preflight", "off", script) if way == "launch" else (way, "--", sys.executable, script)
    watched = bench.gpuwatch(*command)
    plain = json.loads(bench.finish(bench.start_program(sys.executable, script)).stdout)

    assert watched.code == 0, "clean: no fault of gpuwatch's own"
    seen = json.loads(watched.stdout)
    assert {name: seen[name] for name in ("functions", "functions at last", "losses", "endless", "limit")} == {
        name: plain[name] for name in ("functions", "functions at last", "losses", "endless", "limit")
    }
    assert plain["in a module"] <= seen["in a module"] <= plain["in a module"] + NEARLY
    for name in ("less", "more", "levels"):
        assert all(mine - few in (0, 1, 2) for mine, few in zip(seen[name], plain[name], strict=True)), (seen, plain)
    assert min(plain["levels"]) > 240
