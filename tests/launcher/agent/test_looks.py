"""Looks at real processes: one that has our handler, one that has not, one that is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpuwatch.core.recorder.stalls import asking_signals, stack_file_name
from gpuwatch.launcher.agent import stacks as py_spy
from gpuwatch.launcher.agent.last_looks import last_looks
from gpuwatch.launcher.agent.stacks import LOOK_S, StackLook

from ...waiting import until

SCRIPT = """
import ctypes, itertools, marshal, sys, time
from pathlib import Path
if sys.argv[2] == "answers":
    from gpuwatch.worker.answers import answer_with_stacks
    answer_with_stacks(Path(sys.argv[1]), 3, 1)
    if sys.argv[3] == "its own handlers":
        import os, signal
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, lambda *_: os._exit(1))
def rest():
    print("resting", flush=True)
    time.sleep(1000)
def compute():
    print("computing", flush=True)
    while True:
        pass
def compute_in_c():
    print("computing", flush=True)
    sum(itertools.repeat(1, 1 << 62))
def wait_in_c():
    semaphore = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).sem_init(semaphore, 0, 0)
    print("waiting", flush=True)
    ctypes.CDLL(None).sem_wait(semaphore)
def run_new_code():
    text = "\\n".join(f"def f{n}(a, b={n}): return a + b + {n}.5" for n in range(60))
    code = marshal.dumps(compile(text, "new", "exec"))
    print("running", flush=True)
    while True:
        exec(marshal.loads(code), {})
WAYS = {
    "computes": compute, "computes in C": compute_in_c, "waits in C": wait_in_c, "runs new code": run_new_code
}
WAYS.get(sys.argv[3], rest)()
"""


@pytest.fixture(autouse=True)
def no_py_spy(monkeypatch):
    """It is not installed, as on most nodes."""
    monkeypatch.setattr(py_spy, "find_py_spy", lambda: None)


def state(process) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def started(tmp_path):
    processes = []

    def start(answers, what="sleeps"):
        script = tmp_path / "rest.py"
        script.write_text(SCRIPT)
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), answers, what], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        process.stdout.readline()
        while what == "sleeps" and state(process) != "S":
            time.sleep(0.01)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def seen(folder: Path, pid: int):
    began = time.monotonic()
    look = StackLook(folder, 3, 1, pid, began)
    until(lambda: look.is_due(time.monotonic()), "the look is over", lambda: vars(look))
    return look.result()


def test_a_rank_that_sleeps_tells_its_stack_with_the_source(tmp_path, started):
    process = started("answers")
    found = seen(tmp_path, process.pid)

    assert (found.state, found.stack[0].function, found.stack[0].text) == ("S", "rest", "time.sleep(1000)")
    assert found.stack[0].file == str(tmp_path / "rest.py")
    assert process.poll() is None


def test_the_last_look_at_a_node_has_the_stack_of_each_rank_that_answers(tmp_path, started):
    """Rank 4 has no handler, and is not signalled. Both go on: torchrun stops them after that."""
    answers, silent = started("answers"), started("does not")
    looks = last_looks(tmp_path, 1, {3: answers.pid, 4: silent.pid})

    assert [line.function for line in looks[3].main[:1]] == ["rest"]
    assert (looks[3].state, looks[4].state, looks[4].main) == ("S", "S", [])
    assert (answers.poll(), silent.poll()) == (None, None)
    assert last_looks(tmp_path, 1, {}) == {}


@pytest.fixture
def signals(monkeypatch):
    """What was sent, in order."""
    sent, send = [], py_spy._send
    monkeypatch.setattr(py_spy, "_send", lambda pid, number: (sent.append(number), send(pid, number)))
    return sent


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("how", "function", "is_in_c"),
    [
        ("computes", "compute", False),
        ("runs new code", "run_new_code", False),
        ("computes in C", "compute_in_c", True),
        ("waits in C", "wait_in_c", True),
    ],
)
def test_a_rank_that_does_not_sleep_tells_its_stack_and_goes_on(tmp_path, started, signals, how, function, is_in_c):
    """faulthandler is asked of the one in C alone."""
    process = started("answers", how)
    if is_in_c:  # it says so just before
        begun = py_spy._stat(process.pid)[1]
        until(lambda: state(process) == "S" or py_spy._stat(process.pid)[1] > begun + 5, "it is in C", lambda: begun)
    found = seen(tmp_path, process.pid)

    assert function in [line.function for line in found.stack]
    assert (found.busy > 0) == (how != "waits in C")
    in_python, in_c = asking_signals()
    assert signals == ([in_python, in_c] if is_in_c else [in_python])
    assert process.poll() is None


@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_rank_that_runs_python_may_be_asked_at_any_time(tmp_path, started):
    """faulthandler ends it, from CPython 3.11 on, after some thousands of signals."""
    process = started("answers", "runs new code")
    file = tmp_path / stack_file_name(3, 1)
    for number in range(1, 3001):
        look = StackLook(tmp_path, 3, 1, process.pid, time.monotonic())
        until(lambda look=look: look.size > 0 or process.poll() is not None, f"answer {number}", lambda: process.poll())
        assert process.poll() is None
    assert file.read_text().count("most recent call first") >= 3000


@pytest.mark.slow
def test_a_rank_that_was_stopped_is_not_asked_by_faulthandler(tmp_path, started, signals):
    """It may be anywhere in Python."""
    process = started("answers", "runs new code")
    process.send_signal(signal.SIGSTOP)
    until(lambda: state(process) == "T", "it is stopped", lambda: state(process))
    seen(tmp_path, process.pid)

    assert signals == [asking_signals().in_python]


@pytest.mark.slow
def test_each_look_has_the_stack_of_its_own_time(tmp_path, started):
    process = started("answers")
    first, second = seen(tmp_path, process.pid), seen(tmp_path, process.pid)

    assert first.stack == second.stack != []
    assert (tmp_path / stack_file_name(3, 1)).read_text().count("most recent call first") == 2


@pytest.mark.slow
def test_a_process_without_the_handler_is_not_signalled(tmp_path, started):
    """The signal would end it."""
    process = started("does not")
    (tmp_path / stack_file_name(3, 1)).touch()
    found = seen(tmp_path, process.pid)

    assert (found.state, found.stack) == ("S", [])
    assert (found.threads[0].name, found.threads[0].state) == (
        Path(f"/proc/{process.pid}/comm").read_text().strip(),
        "S",
    )
    assert process.poll() is None


@pytest.mark.slow
def test_a_process_with_a_handler_of_its_own_is_not_signalled(tmp_path, started):
    """It may leave when it is called, as one for every signal does."""
    process = started("answers", "its own handlers")
    while state(process) != "S":
        time.sleep(0.01)
    found = seen(tmp_path, process.pid)

    assert (found.state, found.stack) == ("S", [])
    assert process.poll() is None


@pytest.mark.slow
def test_a_stopped_rank_is_seen_as_stopped_and_goes_on_when_it_is_resumed(tmp_path, started):
    process = started("answers")
    process.send_signal(signal.SIGSTOP)
    while state(process) != "T":
        time.sleep(0.01)
    found = seen(tmp_path, process.pid)
    process.send_signal(signal.SIGCONT)

    assert (found.state, found.stack, found.native) == ("T", [], [])
    assert [thread.state for thread in found.threads] == ["T"]
    assert process.poll() is None


@pytest.mark.slow
def test_a_process_that_is_gone(tmp_path, started):
    process = started("answers")
    process.kill()
    process.wait()

    assert seen(tmp_path, process.pid).state == ""


def test_a_look_takes_its_time(tmp_path, started):
    look = StackLook(tmp_path, 3, 1, started("answers").pid, 10.0)
    until(lambda: look.size > 0, "the rank's answer")  # one that has not answered is asked again, and has more time

    assert not look.is_due(10.0 + LOOK_S / 2)
    assert look.is_due(10.0 + LOOK_S)
