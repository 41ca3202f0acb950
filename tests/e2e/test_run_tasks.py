"""Several tasks of a host, each a `gpuwatch run`, as mpirun starts them: one agent, one report."""

import hashlib
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
PYTHON = sys.executable
NEVER = ("--rank", "-1", "--batch", "2")


def tasks(bench, *arguments, number=2, options=(), script="own_init.py", here=2):
    """Started in the environment that Open MPI gives its processes (its manual, section 10.8): `here` to a host."""
    command = (PYTHON, bench.script(script), str(bench.cwd / "store"), *arguments)
    return [
        bench.start(
            "gpuwatch.cli.main",
            "run",
            *options,
            "--",
            *command,
            PMIX_NAMESPACE=f"prterun-host-{bench.mark}@1",
            OMPI_COMM_WORLD_SIZE=str(number),
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_SIZE=str(here),
            OMPI_COMM_WORLD_LOCAL_RANK=str(rank % here),
        )
        for rank in range(number)
    ]


def shared_folder(bench):
    key = f"prterun-host-{bench.mark}@1 {socket.gethostname()}"
    return Path("/dev/shm", f"gpuwatch-{os.getuid()}-tasks-{hashlib.sha256(key.encode()).hexdigest()[:16]}")


def test_two_tasks_have_one_report(bench):
    ended = [bench.finish(process) for process in tasks(bench, *NEVER)]

    assert [run.code for run in ended] == [0, 0]
    assert [len(run.stdout.splitlines()) for run in ended] == [6, 0], "each has its own output"
    assert len(list((bench.cwd / "gpuwatch-runs").glob("*/report.json"))) == 2, "one, and the link to the latest"
    assert (ended[0].verdict["kind"], ended[0].verdict["certainty"]) == ("clean", "established")
    assert [rank["rank"] for rank in ended[0].report["ranks"]] == [0, 1]
    assert len(ended[0].report["nodes"]) == 1
    assert sum("VERDICT" in run.stderr for run in ended) == 1
    assert not shared_folder(bench).exists()


def test_an_overflow_is_the_exit_code_of_all(bench):
    ended = [bench.finish(process) for process in tasks(bench, "--rank", "1", "--batch", "2")]

    assert [run.code for run in ended] == [4, 4]
    verdict = ended[0].verdict
    assert (verdict["kind"], verdict["rank"], verdict["module"]) == ("overflow", 1, "block.widen")


@pytest.mark.parametrize("here", [2, 1])
def test_when_a_task_fails_the_others_end(bench, port, here):
    """Of one host, or of two, whose ranks wait for ever."""
    (bench.cwd / "store").mkdir()
    options = ("--head", f"127.0.0.1:{port}") if here == 1 else ()
    ended = [bench.finish(process) for process in tasks(bench, script="left_alone.py", here=here, options=options)]

    assert all(run.code for run in ended)
    verdict = ended[0].verdict
    assert (verdict["kind"], verdict["rank"]) == ("crash", 1)
    assert "raised ValueError: as it was asked to" in verdict["statement"]
    assert [rank["rank"] for rank in ended[0].report["ranks"]] == [0, 1]
    assert any("stopping the command: " in run.stderr for run in ended), "the one that came first has the agent"


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_task_that_is_killed_leaves_nothing(bench, victim):
    """Its ranks end with it, whether it had the agent or not."""
    both = tasks(bench, *NEVER, "--batches", "100000000")
    assert both[0].stdout is not None
    assert both[0].stdout.readline().startswith("batch 0")
    assert shared_folder(bench).is_dir()
    both[victim].kill()
    other = bench.finish(both[1 - victim])
    both[victim].communicate(timeout=400)
    _, alive = psutil.wait_procs(bench.processes(), timeout=120)

    assert alive == []
    assert not shared_folder(bench).exists()
    assert other.code not in (0, -signal.SIGKILL)
    assert len(list((bench.cwd / "gpuwatch-runs").glob("*/report.json"))) == 2
