"""`--rank tp=0,dp=1` of a finished run means the rank at that place of the script's DeviceMesh."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_a_rank_is_found_by_its_place(bench):
    run = bench.launch("meshes.py", "--preflight", "off", nproc=4)
    assert (run.code, run.verdict["rank"]) == (4, 2)
    shown = bench.gpuwatch("report", "--rank", "tp=0,dp=1")
    assert shown.code == 0 and "Rank 2, batch 2: last forward frame" in shown.stdout
    rows = bench.gpuwatch("export", "--table", "frames", "--rank", "dp=1").stdout.splitlines()
    assert {json.loads(row)["rank"] for row in rows} == {2, 3}
    several = bench.gpuwatch("report", "--rank", "tp=1")
    assert several.code == 2 and "found that of ranks 1, 3; add a dimension" in several.stderr
