import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpuwatch.core.codes import VerdictKind
from gpuwatch.core.wire.pipe import JobResult
from gpuwatch.launcher.run import tasks as module
from gpuwatch.launcher.run.tasks import HostTasks


def test_a_task_that_is_coming_has_not_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    owner = HostTasks("a job", number=2)
    flock, seen = fcntl.flock, []

    def the_owner_looks_first(fd, operation):
        if operation == fcntl.LOCK_EX:
            seen.append(owner.any_failed())
        flock(fd, operation)

    monkeypatch.setattr(module.os, "getpid", lambda: 2)
    monkeypatch.setattr(module.fcntl, "flock", the_owner_looks_first)
    other = HostTasks("a job", number=2)
    assert seen == [False], "a task that had not said anything was told as one that had failed"
    assert owner.is_owner
    assert not other.is_owner
    assert len(owner.results()) == 1
    other.close()
    assert owner.any_failed(), "a task that ended without a word has failed"
    owner.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Shared memory and the folder for temporary files, both empty."""
    found = [tmp_path / "shm", tmp_path / "tmp"]
    for folder in found:
        folder.mkdir()
    monkeypatch.setattr(module, "_SHARED_MEMORY", found[0])
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(found[1]))
    return found


def of_another_user(path):
    path.mkdir()
    try:
        os.chown(path, 4711, 4711)
    except PermissionError:
        path.chmod(0o777)  # in which everybody may write: as little to be trusted


@pytest.mark.parametrize(
    "take",
    [
        lambda path: path.symlink_to("/nowhere/at/all"),
        lambda path: path.symlink_to("/"),
        of_another_user,
        lambda path: path.write_text("something"),
    ],
    ids=["dangling link", "link", "another user's folder", "file"],
)
def test_a_name_that_others_have_taken_is_not_needed(take, places, monkeypatch):
    taken = name_of_folder(places)
    take(taken)
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    owner = HostTasks("a job", number=2)
    monkeypatch.setattr(module.os, "getpid", lambda: 2)
    other = HostTasks("a job", number=2)

    assert (owner.is_owner, other.is_owner) == (True, False)
    assert len(owner.results()) == 1
    taken.rename(taken.with_name("gone"))  # and it may be given back at any time
    monkeypatch.setattr(module.os, "getpid", lambda: 3)
    late = HostTasks("a job", number=2)
    assert not late.is_owner
    for task in (late, other, owner):
        task.close()
    assert [path.name for path in places[0].iterdir()] == ["gone"]


def name_of_folder(places):
    task = HostTasks("a job", number=2)
    (found,) = places[0].iterdir()
    task.close()
    assert not list(places[0].iterdir())
    return found


def test_without_any_name_the_command_runs_unwatched(places, monkeypatch):
    """The real command, in a job of its own mark."""
    monkeypatch.undo()
    job = f"a-job-of-{os.getpid()}-{time.monotonic_ns()}"
    key = hashlib.sha256(f"{job} {socket.gethostname()}".encode()).hexdigest()[:16]
    names = [f"gpuwatch-{os.getuid()}-tasks-{key}", *(f"gpuwatch-{os.getuid()}-tasks-{key}-{n}" for n in range(1, 64))]
    links = [base / name for base in (Path("/dev/shm"), places[1]) for name in names]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "GPUWATCH"))}
    of_job = {"PMIX_NAMESPACE": job, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    of_host = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "TMPDIR": str(places[1])}
    try:
        for link in links:
            link.symlink_to("/nowhere/at/all")
        ended = subprocess.run(
            [sys.executable, "-m", "gpuwatch.cli.main", "run", "--", "sh", "-c", "echo hello; exit 3"],
            env={**environ, **of_job, **of_host},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for link in links:
            link.unlink()
    assert (ended.returncode, ended.stdout) == (3, "hello\n")
    said = (
        "gpuwatch: the tasks of this host have no folder in which to find each other, and go on unwatched: other users "
        "have taken all names, such as"
    )
    assert ended.stderr == f"{said} {links[0]} [GW421]\n"


def test_a_job_of_the_same_name_begins_when_the_one_before_has_left(places, monkeypatch):
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    before = HostTasks("a job", number=2)
    before.share_verdict(JobResult(0, VerdictKind.CLEAN, "No overflow.", ""))
    leaves = threading.Event()

    def sleep(seconds):
        leaves.set()
        real_sleep(seconds)

    real_sleep = time.sleep
    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.os, "getpid", lambda: 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(HostTasks, "a job", number=2)
        assert leaves.wait(60), "the second job did not wait for the first to leave"
        assert not waiting.done()
        before.close()
        after = waiting.result(60)
    assert after.is_owner
    assert after.verdict() is None
    after.close()
    assert not [path for folder in places for path in folder.iterdir()]


def test_none_is_to_come_where_each_task_has_had_its_rank(places, monkeypatch):
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    owner = HostTasks("a job", number=2)

    assert not owner.all_ended()
    assert not owner.all_ended(num_ranks=1)
    assert owner.all_ended(num_ranks=2)
    owner.close()
