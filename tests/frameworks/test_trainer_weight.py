"""transformers' own Trainer: on one rank a weight becomes nan through `.data` between two steps, and it is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "trainer_weight.py"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [[], ["--compiled"]], ids=["eager", "compiled"])
def test_a_weight_that_was_changed_between_two_steps_is_named(tmp_path, options):
    """In compiled code, too, which the model's own loss breaks in two."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    command = ["launch", "--nproc-per-node", "2", "--preflight", "off", str(SCRIPT), *options]
    done = subprocess.run(
        [sys.executable, "-m", "gpuwatch.cli.main", *command], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )

    assert done.returncode == 4, done.stderr
    report = json.loads((tmp_path / "gpuwatch-runs" / "latest" / "report.json").read_text())
    verdict = report["verdict"]
    named = (verdict["kind"], verdict["rank"], verdict["module"], verdict["phase"], verdict["role"])
    assert named == ("overflow", 1, "transformer.h.1.mlp.c_fc", "weight", "weight")
    assert verdict["certainty"] == "established"
    assert not any("learning rate that is too high" in line for line in verdict["next"])
    assert "not inspected" not in str(verdict)
    assert not any(rank["faults"] for rank in report["ranks"])
