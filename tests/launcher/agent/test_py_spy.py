"""A process that does not answer, seen by py-spy: real processes, and outputs as py-spy 0.4.3 has printed them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from gpuwatch.launcher.agent.stacks import LIMIT_S, PySpy, StackLook, find_py_spy, parse_spied

from ...waiting import WAIT_S, until

PID = 4711
SCRIPT = """
import threading, time
ready = threading.Event()
def load():
    ready.set() or threading.Event().wait()
def rest():
    print("resting", flush=True)
    time.sleep(1000)
threading.Thread(target=load, name="loader", daemon=True).start()
ready.wait()
rest()
"""


def frame(name, file, line=0):
    short = file.rpartition("/")[2]
    return {"name": name, "filename": file, "module": None, "short_filename": short, "line": line, "locals": None}


def printed(*threads):
    return msgspec.json.encode(
        [{"pid": PID, "thread_id": 1, "os_thread_id": n, "thread_name": name, "frames": f} for n, name, f in threads]
    )


MAIN = [
    frame("0x7f4b81ca3f16", "/usr/lib/libc.so.6"),
    frame("clock_nanosleep", "/usr/lib/libc.so.6"),
    frame("time_sleep (timemodule.c)", "libpython3.11.so.1.0"),
    frame("Trainer.step", "/home/me/train.py", 41),
    frame("_PyEval_Vector", "libpython3.11.so.1.0"),
    frame("main", "/home/me/train.py", 50),
]
LOADER = [frame("Condition.wait", "/lib/python3.11/threading.py", 327), frame("load", "/home/me/data.py", 7)]


def test_pythons_calls_and_the_native_ones_inside_of_them_are_told_apart():
    found = parse_spied(printed((PID + 1, "loader", LOADER), (PID, "MainThread", MAIN)), PID)
    assert found is not None
    assert [line.shown for line in found.stack] == ["/home/me/train.py:41 in step", "/home/me/train.py:50 in main"]
    assert [line.function for line in found.native] == ["clock_nanosleep", "time_sleep (timemodule.c)"]
    assert [(thread.name, thread.at) for thread in found.threads] == [("loader", "data.py:7 in load")]


def test_lines_of_c_are_no_calls_of_python():
    """An interpreter that was built with -g has them."""
    frames = [
        frame("do_futex_wait", "/usr/lib/libc.so.6"),
        frame("cfunction_call", "Objects/methodobject.c", 542),
        *MAIN[3:],
    ]
    found = parse_spied(printed((PID, "MainThread", frames)), PID)
    assert found is not None
    assert [line.function for line in found.stack] == ["step", "main"]
    assert [line.function for line in found.native] == ["do_futex_wait", "cfunction_call"]


@pytest.mark.parametrize("data", [b"", b"Error: x", b"[]", b"[7]", b"{}", b"[" * 100_000, printed()[:-1]])
def test_anything_else_is_nothing(data):
    assert parse_spied(data, PID) is None


@pytest.fixture
def resting(tmp_path):
    script = tmp_path / "rest.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "resting\n"
        yield process
        process.kill()


def looked(folder, pid):
    """A look at a process without our handler."""
    began = time.monotonic()
    look = StackLook(folder, 3, 1, pid, began)
    until(lambda: look.is_due(time.monotonic()), "the look is over", lambda: vars(look))
    return look.result()


@pytest.fixture
def allowed(resting):
    """py-spy may look at other processes here: not in every container, and not under every kernel's settings."""
    program = find_py_spy()
    if program is None or subprocess.run([program, "dump", "--pid", str(resting.pid)], capture_output=True).returncode:
        pytest.skip("py-spy is not installed, or may not look at a process")


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_process_without_a_handler_is_seen(tmp_path, resting, monkeypatch):
    monkeypatch.setattr("gpuwatch.launcher.agent.stacks.LIMIT_S", WAIT_S)
    found = looked(tmp_path, resting.pid)
    assert (found.stack[0].function, found.stack[0].text) == ("rest", "time.sleep(1000)")
    assert found.stack[0].file == str(tmp_path / "rest.py")
    assert [(thread.name, thread.at) for thread in found.threads[1:]] == [
        ("loader", "rest.py:5 in load: ready.set() or threading.Event().wait()")
    ]
    assert resting.poll() is None


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_stopped_process_is_read_as_it_stands_and_stays_stopped(tmp_path, resting, monkeypatch):
    monkeypatch.setattr("gpuwatch.launcher.agent.stacks.LIMIT_S", WAIT_S)
    resting.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, resting.pid, os.WSTOPPED | os.WNOWAIT)
    found = looked(tmp_path, resting.pid)
    assert (found.state, found.stack[0].function) == ("T", "rest")
    assert Path(f"/proc/{resting.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def program(folder: Path, body: str) -> str:
    """Stands for a py-spy that fails: what of it is tried is what our side does then."""
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_one_that_does_not_end_is_ended_at_its_deadline(tmp_path):
    spy = PySpy(os.getpid(), "S", 10.0, program(tmp_path, "exec sleep 1000"))
    assert not spy.is_done(10.0 + LIMIT_S / 2)
    assert spy.is_done(10.0 + LIMIT_S)
    child = spy._child
    assert spy.result() is None
    assert child is not None
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("body", ["echo Permission denied >&2; exit 1", "echo nonsense", "yes | head -c 5000000"])
def test_one_that_may_not_look_or_says_something_else_is_nothing(tmp_path, body):
    spy = PySpy(os.getpid(), "S", 10.0, program(tmp_path, body))
    until(lambda: spy.is_done(10.0), "py-spy has ended")
    assert spy.result() is None


@pytest.mark.parametrize("state", ["", "t", "Z"])
def test_a_process_that_a_debugger_has_or_that_has_ended_is_left_alone(tmp_path, state):
    spy = PySpy(os.getpid(), state, 10.0, program(tmp_path, "exec sleep 1000"))
    assert (spy.is_done(10.0), spy.result()) == (True, None)


@pytest.mark.slow
def test_without_py_spy_the_kernel_is_asked(tmp_path, resting, monkeypatch):
    monkeypatch.setattr("gpuwatch.launcher.agent.stacks.find_py_spy", lambda: str(tmp_path / "none"))
    found = looked(tmp_path, resting.pid)
    assert (found.stack, found.native) == ([], [])
    assert len(found.threads) == 2
