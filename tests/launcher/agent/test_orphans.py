"""What is ended once a `gpuwatch run` was killed, and what is left alone: real processes."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest
from gpuwatch.core.recorder.run_folder import RUN_VARIABLE
from gpuwatch.launcher.agent.process_ends import GRACE_S, RunOrphans

READY = "echo ready; while true; do sleep 3600 & wait $!; done"


def end_all(group):
    with suppress(ProcessLookupError):  # it has ended, and what it had started, too
        os.killpg(group, signal.SIGKILL)


@pytest.fixture
def start():
    """A shell that is ready; with `own_session` it has left this process's."""
    with ExitStack() as stack:

        def begin(script=READY, *, run="", own_session=False):
            process = subprocess.Popen(
                ["sh", "-c", script],
                env={**os.environ, RUN_VARIABLE: str(run)},
                stdout=subprocess.PIPE,
                process_group=None if own_session else 0,
                start_new_session=own_session,
            )
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            stack.callback(process.wait)
            stack.callback(end_all, process.pid)
            assert process.stdout.readline() == b"ready\n"
            return process

        yield begin


def test_what_is_of_the_run_ends_and_a_service_stays(start, tmp_path):
    of_the_run, rank = start(run=tmp_path), start(run=tmp_path, own_session=True)
    service = start(run=tmp_path, own_session=True)
    another, unwatched = start(run=f"{tmp_path}2"), start()
    orphans = RunOrphans(tmp_path, os.getsid(0), lambda: [rank.pid], 0.0)

    assert not orphans.are_gone(0.0)
    assert [of_the_run.wait(), rank.wait()] == [-signal.SIGTERM] * 2
    assert [process.poll() for process in (service, another, unwatched)] == [None] * 3


def test_what_does_not_hear_is_killed(start, tmp_path):
    stubborn = start(f"trap '' TERM; {READY}", run=tmp_path)
    orphans = RunOrphans(tmp_path, os.getsid(0), list, 0.0)

    assert not orphans.are_gone(0.0)
    assert not orphans.are_gone(GRACE_S - 1)
    assert stubborn.poll() is None
    assert not orphans.are_gone(GRACE_S + 1)
    assert stubborn.wait() == -signal.SIGKILL


NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no PID namespace can be made here",
)
@pytest.mark.skipif("GPUWATCH_TEST_INSIDE" in os.environ, reason="this is the one inside")
def test_the_leader_of_the_session_may_be_outside_of_the_pid_namespace():
    """As in a container whose first process made no session of its own: the kernel tells session 0."""
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    run = subprocess.run(
        [*NAMESPACE, *tests],
        env={**os.environ, "GPUWATCH_TEST_INSIDE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
