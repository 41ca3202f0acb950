"""A Ray that was started before the run: its workers are watched once they are given the variables of the run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from rows import OVERFLOW, PYTHON, RAY, Row, environment, run_to_overflow

pytestmark = pytest.mark.soak  # Ray takes a minute to start twice
START_S = 300.0


@pytest.fixture
def address() -> Iterator[str]:
    """Of a Ray that knows nothing of gpuwatch."""
    pytest.importorskip("ray")
    with (
        ports_of_this_test((number,) for number in range(24000, 25000)) as (port,),
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder,  # its sockets need a short path
    ):
        options = ("--head", "--block", "--port", str(port), "--num-cpus", "2", "--temp-dir", folder)
        command = [PYTHON, "-m", "ray.scripts.scripts", "start", *options, "--include-dashboard", "false"]
        log = Path(folder, "started")
        with log.open("w") as out:
            head = subprocess.Popen(command, env={**environment(), **RAY}, stdout=out, stderr=subprocess.STDOUT)
        try:
            ends = time.monotonic() + START_S
            while "Ray runtime started" not in log.read_text():
                assert head.poll() is None and time.monotonic() < ends, log.read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(60)


def test_its_workers_are_ranks_of_the_run(address: str, tmp_path: Path):
    row = Row("Ray Train", "ray", "", (PYTHON,), "with_ray.py", ("--how", address), environment=RAY)
    overflowed, found = run_to_overflow(row, 2, tmp_path, 0)

    assert overflowed.code == OVERFLOW, overflowed.text
    assert (found["kind"], found["rank"], found["module"]) == ("overflow", 1, "block.widen")
