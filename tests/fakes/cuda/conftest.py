"""The tests of the stand-in, and of gpuwatch on it: they run where the stand-in does (`make cuda-stub`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("STAND_IN_CUDA") else ["test_*.py"]
LIMIT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if __file__.rpartition("/")[0] in str(item.path):
            item.add_marker("stand_in")


@pytest.fixture
def alone() -> Any:
    """Runs code in a process of its own, with more of the environment; what its last line says, as JSON."""

    def run(code: str, **environment: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def counted() -> Any:
    """What a call adds to the counters: those that it changed."""
    from stand_in_cuda.library import counts

    def run(call: Any) -> dict[str, int]:
        before = counts()
        call()
        return {name: number - before[name] for name, number in counts().items() if number != before[name]}

    return run
