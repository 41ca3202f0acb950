"""Looks at real processes: one that has our handler, one that has not, one that is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpuwatch.core.recorder.stalls import stack_file_name
from gpuwatch.launcher.agent import stacks as py_spy
from gpuwatch.launcher.agent.last_looks import last_looks
from gpuwatch.launcher.agent.stacks import LOOK_S, StackLook

from ...waiting import until

SCRIPT = """
import sys, time
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
{"computes": compute}.get(sys.argv[3], rest)()
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


@pytest.mark.slow
def test_a_rank_that_computes_is_busy_and_goes_on(tmp_path, started):
    process = started("answers", "computes")
    found = seen(tmp_path, process.pid)

    assert found.stack[0].function == "compute"
    assert found.busy > 0
    assert process.poll() is None


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

    assert not look.is_due(10.0 + LOOK_S / 2)
    assert look.is_due(10.0 + LOOK_S)
