from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from gpuwatch.launcher.agent.process_ends import ProcessEnds, is_over

from ...waiting import until

WAITS = [sys.executable, "-S", "-c", "input()"]


@pytest.fixture
def ends():
    ends = ProcessEnds()
    yield ends
    ends.close()


def wait(ends):
    """Until a process has ended."""
    assert select.select([ends.fd], [], [], 60)[0]


def test_each_end_has_its_time_in_the_order_of_the_ends(ends):
    children = [subprocess.Popen(WAITS, stdin=subprocess.PIPE) for _ in range(3)]
    for rank, child in enumerate(children):
        ends.watch((rank, 0), child.pid)
    assert [ends.when_ns((rank, 0)) for rank in range(3)] == [(0, 0)] * 3
    before = time.time_ns()
    for rank in (2, 0, 1):
        ends.poll()
        children[rank].kill()
        wait(ends)
        ends.poll()
        children[rank].wait()
        children[rank].stdin.close()
    times = [ends.when_ns((rank, 0)) for rank in (2, 0, 1)]
    instants = [before, *(instant for looks in times for instant in looks), time.time_ns()]
    assert instants == sorted(instants)


def test_what_a_process_had_in_memory_is_known_after_its_end(ends):
    child = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    ends.watch((0, 0), child.pid)

    def resident():
        ends.poll()
        return ends.resident((0, 0))

    before = until(lambda: resident() > 1 << 20 and resident(), "its program is loaded", resident)
    child.kill()
    wait(ends)
    ends.poll()
    child.wait()
    child.stdin.close()
    assert before <= ends.resident((0, 0)) < 1 << 30
    assert ends.resident((1, 0)) == 0


def test_a_process_that_is_no_child_is_told_too(ends):
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    pid = int(shell.stdout.readline())
    ends.watch((0, 0), pid)
    subprocess.run(["kill", "-9", str(pid)], check=True)
    wait(ends)
    alive, gone = ends.when_ns((0, 0))
    assert 0 < alive < gone
    shell.wait()
    shell.stdout.close()


def test_a_process_that_has_ended_before_has_no_time(ends):
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    ends.watch((0, 0), child.pid)
    assert ends.when_ns((0, 0)) == (0, 0)


def test_what_has_ended_and_what_runs_on_is_told_apart(ends):
    """Also of a process that nobody could watch: one whose parent has not yet seen its end is over, too."""
    ended, runs = (subprocess.Popen(WAITS, stdin=subprocess.PIPE) for _ in range(2))
    ends.watch((0, 0), ended.pid)
    assert not ends.has_ended((0, 0), ended.pid)
    ended.kill()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)

    assert ends.has_ended((0, 0), ended.pid)
    assert ends.has_ended((1, 0), ended.pid), "nobody watched this one, and its parent has not waited for it"
    assert not ends.has_ended((2, 0), runs.pid)
    for child in (ended, runs):
        child.kill()
        child.wait()
        child.stdin.close()
    assert ends.has_ended((2, 0), runs.pid)


@pytest.mark.parametrize("pending", ["SigPnd", "ShdPnd"])
def test_a_process_that_sigkill_has_reached_ends_now(pending):
    """It may be in a driver for seconds, and is no rank that trains on."""
    masks = {"SigPnd": 0, "ShdPnd": 0}
    lines = ["Name:\tpython", "State:\tD (disk sleep)", *(f"{name}:\t{mask:016x}" for name, mask in masks.items())]
    assert not is_over("\n".join(lines))
    masks[pending] = 1 << signal.SIGKILL - 1
    lines = ["Name:\tpython", "State:\tD (disk sleep)", *(f"{name}:\t{mask:016x}" for name, mask in masks.items())]
    assert is_over("\n".join(lines))
