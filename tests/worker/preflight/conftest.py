"""Ranks for real: forked processes that form gloo groups."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Outcomes = dict[int, dict[str, Any]]


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., Outcomes]]:
    """`run_ranks("group", [0, 1], {1: "adds wrong"})`: what came of every rank."""
    server = Path(__file__).parent / "ranks_server.py"
    process = subprocess.Popen([sys.executable, server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(call: str, ranks: list[int], faults: dict[int, str] | None = None, **more: Any) -> Outcomes:
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"call": call, "ranks": ranks, "faults": faults or {}, "timeout_s": 40.0, **more}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return {int(rank): outcome for rank, outcome in json.loads(process.stdout.readline()).items()}

    yield run
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    assert process.wait(timeout=300) == 0
    process.stdout.close()
