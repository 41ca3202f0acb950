"""os.exec and os._exit of the script's own: real processes, whose recorders are read afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gpuwatch.core.events.script_events import ExitCall
from gpuwatch.core.recorder.layout import RankPhase
from gpuwatch.core.recorder.reader import RecorderReader

BEGIN = """
import os, posix, sys, threading
from pathlib import Path
from gpuwatch.core.recorder.layout import RankPhase
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.session import open_session, watch_the_ends
session = open_session(WorkerSettings(""), Path(sys.argv[1]), 0, 0, 1)
watch_the_ends(lambda environment: {"WATCHED": "again"} if session.is_ours else {})
session.enter(RankPhase.SCRIPT)
NEXT = [sys.executable, "-S", "-c", "import os; print('next', os.environ.get('WATCHED'), os.environ.get('OWN'))"]
def try_exec():
    try:
        os.execvp("no-such-program-anywhere", ["x"])
    except FileNotFoundError as error:
        print("as without us", error.filename)
"""


def ended(tmp_path, script):
    """(exit code, what it printed, its phase, whether it was heard to leave)"""
    path = tmp_path / "recorder"
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    reader = RecorderReader(path)
    try:
        return (
            done.returncode,
            done.stdout.split("\n")[:-1],
            RankPhase[reader.state().phase.upper()],
            reader.state().left,
        )
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("call", "prints"),
    [
        ("os.execv(NEXT[0], NEXT)", "next again None"),
        ("os.execvp(NEXT[0], NEXT)", "next again None"),
        ("os.execlpe(NEXT[0], *NEXT, {'OWN': '1'})", "next again 1"),
        ("posix.execve(NEXT[0], NEXT, env={'OWN': '1'})", "next again 1"),
        ("threading.Thread(target=os.execv, args=(NEXT[0], NEXT)).start()", "next again None"),
    ],
)
def test_a_rank_that_goes_on_as_another_program_says_so(tmp_path, call, prints):
    assert ended(tmp_path, call) == (0, [prints], RankPhase.UNWATCHED, False)


def test_an_exec_that_fails_leaves_all_as_it_was(tmp_path):
    script = "before = dict(os.environ)\ntry_exec()\nprint(before == dict(os.environ))"
    assert ended(tmp_path, script) == (
        0,
        ["as without us None", "True"],
        RankPhase.SCRIPT,
        False,
    )


def test_a_forked_child_may_do_both_and_its_parents_record_stays(tmp_path):
    script = """
for call in (lambda: os._exit(3), lambda: os.execv(NEXT[0], NEXT)):
    child = os.fork()
    if not child:
        call()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    assert ended(tmp_path, script) == (0, ["3", "next None None", "0"], RankPhase.SCRIPT, False)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("script", "phase", "left"),
    [
        ("os._exit(5)", RankPhase.SCRIPT, True),
        ("session.enter(RankPhase.FORWARD); os._exit(5)", RankPhase.FORWARD, False),
        ("threading.Thread(target=os._exit, args=(5,)).start(); threading.Event().wait()", RankPhase.SCRIPT, False),
        (
            # a thread of ours stands still with the lock: the end is not held up for long, and not said to be known
            "import types, gpuwatch.worker.session as s; s.SETTLE_S = 0.1\n"
            "from gpuwatch.worker.record.progress import RecorderLock; from array import array\n"
            "lock = RecorderLock(array('q', [-1, 0, 0])); held = threading.Event()\n"
            "session.hooks = types.SimpleNamespace(progress=types.SimpleNamespace(lock=lock))\n"
            "threading.Thread(target=lambda: (lock.__enter__(), held.set()), daemon=True).start()\n"
            "held.wait(); os._exit(5)",
            RankPhase.SCRIPT,
            False,
        ),
    ],
)
def test_os_exit_between_two_batches_is_an_end_that_was_heard(tmp_path, script, phase, left):
    assert ended(tmp_path, script) == (5, [], phase, left)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("os._exit(5)", "gives_up"),
        ("session.enter(RankPhase.BACKWARD); os._exit(5)", "gives_up"),
        ("import numpy; os._exit(numpy.int64(5))", "gives_up"),
        ("try:\n        os._exit('5')\n    except TypeError:\n        pass", None),
        ("child = FORKS.Process(target=print); child.start(); child.join()", None),
        ("child = os.fork() or os._exit(5); os.waitpid(child, 0); session.enter(RankPhase.SCRIPT)", None),
    ],
)
def test_the_line_of_os_exit_is_told_by_the_rank_alone_and_not_by_its_forks(tmp_path, call, name):
    """A fork of multiprocessing ends by os._exit below the frames of its parent."""
    path = tmp_path / "recorder"
    script = tmp_path / "script.py"
    forks = "import multiprocessing\nFORKS = multiprocessing.get_context('fork')\n"
    script.write_text(f"{BEGIN}{forks}def gives_up():\n    {call}\ngives_up()\n")
    subprocess.run([sys.executable, str(script), str(path)], check=False, timeout=120)
    reader = RecorderReader(path)
    try:
        calls = [event for event in reader.new_entries()[1] if isinstance(event, ExitCall)]
    finally:
        reader.close()
    assert [(call.line.file, call.line.function) for call in calls] == ([(str(script), name)] if name else [])
