"""What becomes a rank below a command, and how it ended: real processes, their recorders written by hand."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from gpuwatch.core.recorder import writer
from gpuwatch.core.recorder.layout import file_name
from gpuwatch.core.recorder.run_folder import process_file
from gpuwatch.core.wire.pipe import WorkersEnded, WorkersStarted
from gpuwatch.launcher.run.ranks import Ranks


def record(monkeypatch, pid, path, attempt=0):
    """What such a process would leave as rank 0."""
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "getpid", lambda: pid)
        sizes = {"log_bytes": 1 << 16, "segments": 2}
        writer.RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=attempt, **sizes).close()


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_had_a_model_and_no_optimizer_is_a_rank_whose_end_is_known(tmp_path, monkeypatch, code):
    """It is known to be a rank when it has ended: nobody watched its process, and the run has its code."""
    command = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    command.wait()
    record(monkeypatch, command.pid, tmp_path / process_file(command.pid))
    told, ended = [], []
    ranks = Ranks(tmp_path, told.append, lambda *end: ended.append(end))

    ranks.last_look({command.pid: command.returncode})

    assert ended == [(0, 0, code)]
    assert [type(each) for each in told] == [WorkersStarted, WorkersEnded]
    assert told[1].codes == {0: code}
    ranks.close()


def test_a_rank_that_is_the_command_has_ended_by_itself_once_whoever_started_it_says_so(tmp_path, monkeypatch):
    """What watches its process may be slower than the run, which ends the other ranks then: here it sees nothing."""
    command = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record(monkeypatch, command.pid, tmp_path / file_name(0, 0))
    told = []
    ranks = Ranks(tmp_path, told.append, lambda *end: None)
    ranks.look({command.pid: None})

    ranks.last_look({command.pid: -signal.SIGKILL})
    ranks.stopping = True
    command.communicate(b"\n")
    ranks.last_look({command.pid: -signal.SIGKILL})

    assert told[1:] == [WorkersEnded(0, {0: -signal.SIGKILL}, [0])]
    ranks.close()


@pytest.mark.parametrize("becomes", ["ranks", "processes"])
def test_a_process_that_goes_on_as_another_program_is_two_attempts_of_one_rank(tmp_path, monkeypatch, becomes):
    """The first ends when the second begins: the process itself has not ended."""
    command = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(3)"], stdin=subprocess.PIPE)
    path = (lambda n: file_name(0, n)) if becomes == "ranks" else (lambda n: process_file(command.pid, n))
    record(monkeypatch, command.pid, tmp_path / path(0))
    told, ended = [], []
    ranks = Ranks(tmp_path, told.append, lambda *end: ended.append(end))
    ranks.look({command.pid: None})
    record(monkeypatch, command.pid, tmp_path / path(1), attempt=1)
    ranks.look({command.pid: None})
    assert ended == ([(0, 0, 0)] if becomes == "ranks" else [])

    command.communicate(b"\n")
    ranks.last_look({command.pid: command.returncode})

    assert ended == [(0, 0, 0), (1, 0, 3)]
    assert [(type(each), each.attempt) for each in told if isinstance(each, WorkersStarted)] == [
        (WorkersStarted, 0),
        (WorkersStarted, 1),
    ]
    ranks.close()
