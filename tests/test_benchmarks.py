"""The benchmarks run. What they measure here says nothing: other tests run beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.slow
def test_the_hosts_cost_is_measured_with_each_variant(tmp_path):
    """In it, fakes stand in for the reader's kernels: they must have all of them."""
    found = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "host_cost.py", "--models", "gpt2", "--rounds", "1", "--steps", "1"]
    done = subprocess.run([*command, "--json", found], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    variants = {row["variant"] for row in json.loads(found.read_bytes())["rows"]}
    assert {"floor", "host, native", "host, Python", "device buffer", "device buffer +grads"} < variants
