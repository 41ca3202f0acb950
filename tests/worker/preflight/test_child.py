"""Real children: how each of their endings is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from gpuwatch.worker.preflight.probe_child import ProbeFailure, RankChild


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    """This process may have some of other tests."""
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


def run_once(call, deadline_s, on_line=lambda step: None):
    """`call(say)` in a child of its own."""
    child = RankChild(lambda _, say: call(say))
    try:
        return child.run(b"", deadline_s, on_line)
    finally:
        child.close()


def is_gone(pid: int) -> bool:
    """Whether a process that is not ours to reap has ended, or does so in a moment."""
    try:
        psutil.Process(pid).wait(timeout=10)
    except psutil.NoSuchProcess:
        pass
    return not psutil.pid_exists(pid)


def test_the_result_comes_back_and_the_steps_are_heard():
    heard: list[str] = []

    def call(say):
        say("first")
        say("second")
        print("what a library prints is no line of ours")
        return {"answer": list(range(50_000))}

    ending = run_once(call, 20, heard.append)
    assert (ending.kind, ending.said, heard) == ("ok", "second", ["first", "second"])
    assert ending.value == {"answer": list(range(50_000))}  # more than a pipe holds


def test_a_failed_check_comes_back_with_all_that_it_says():
    def call(say):
        raise ProbeFailure("two words differ", peers=[3], next="Look at rank 3.")

    ending = run_once(call, 20)
    assert ending.kind == "raised"
    failure = ending.failure
    assert (failure.detail, failure.peers, failure.next) == ("two words differ", [3], "Look at rank 3.")


@pytest.mark.parametrize(("error", "ours"), [(RuntimeError("CUDA error: 700"), False), (AttributeError("oops"), True)])
def test_an_exception_that_nobody_foresaw_is_told_apart_from_an_error_of_ours(error, ours):
    def call(say):
        raise error

    ending = run_once(call, 20)
    assert (ending.kind, ending.failure, ending.ours) == ("raised", None, ours)
    assert ending.detail == f"{type(error).__name__}: {error}"
    assert "Traceback" in ending.output


def test_one_that_dies_is_told_with_its_signal_its_step_and_its_last_words():
    def call(say):
        say("init")
        os.write(2, b"NCCL WARN no such device\n")
        os.kill(os.getpid(), signal.SIGTERM)

    ending = run_once(call, 20)
    assert (ending.kind, ending.said) == ("died", "init")
    assert ending.detail == "killed by SIGTERM: NCCL WARN no such device"


def test_one_that_leaves_without_a_word_is_told_with_its_exit_code():
    assert run_once(lambda say: os._exit(7), 20).detail == "exit code 7"


@pytest.mark.slow
def test_one_that_hangs_is_ended_at_its_deadline_with_all_that_it_has_started():
    started: list[str] = []

    def call(say):
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        say(str(grandchild.pid))
        signal.pause()

    ending = run_once(call, 1.0, started.append)
    assert ending.kind == "hung"
    assert ending.detail == f"hung at {started[0]} for 1 s"
    assert is_gone(int(started[0]))


@pytest.mark.slow
def test_a_child_ends_with_its_parent():
    """A parent that is killed in the middle leaves none."""
    script = (
        "import os, signal\n"
        "from gpuwatch.worker.preflight.probe_child import RankChild\n"
        "def call(say):\n"
        "    say(str(os.getpid()))\n"
        "    signal.pause()\n"
        "RankChild(lambda _, say: call(say)).run(b'', 100, lambda step: print(step, flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert is_gone(child.pid)


def test_a_child_that_stops_itself_is_ended_too():
    ending = run_once(lambda say: os.kill(os.getpid(), signal.SIGSTOP), 0.5)
    assert ending.kind == "hung"


def test_one_child_does_one_test_after_the_other():
    child = RankChild(lambda request, say: [request, os.getpid()])
    first, second = (child.run(request, 20).value for request in ("one", "two"))
    child.close()
    assert (first[0], second[0]) == ("one", "two")
    assert first[1] == second[1] != os.getpid()


@pytest.mark.parametrize("way", ["hangs", "dies", "raises"])
def test_a_test_that_fails_ends_the_child_and_the_next_one_gets_a_new_one(way):
    def perform(request, say):
        os.write(2, request)
        say(request.decode().strip())
        if request.startswith(b"hangs"):
            signal.pause()
        elif request.startswith(b"dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif request.startswith(b"raises"):
            raise ProbeFailure("a word is wrong")
        return os.getpid()

    child = RankChild(perform)
    first = child.run(b"first", 20)
    failed = child.run(way.encode(), 0.5 if way == "hangs" else 20)
    after = child.run(b"after", 20)
    child.close()
    assert failed.kind == {"hangs": "hung", "dies": "died", "raises": "raised"}[way]
    assert failed.said == way
    assert failed.output == way, "what the tests before it have written is not its own"
    assert (first.kind, after.kind) == ("ok", "ok")
    assert first.value != after.value
    assert is_gone(int(first.value))


def test_a_child_that_dies_between_two_tests_is_told():
    child = RankChild(lambda request, say: os.getpid())
    pid = int(child.run(b"", 20).value)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ending = child.run(b"", 20)
    assert (ending.kind, ending.detail) == ("died", "killed by SIGKILL")
    assert int(child.run(b"", 20).value) != pid
    child.close()
