"""What becomes a rank below a command, and how it ended: real processes, their recorders written by hand."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from gpuwatch.core.host import host_name
from gpuwatch.core.identity import number_of_process, pid_of_number
from gpuwatch.core.recorder import recorder_file, writer
from gpuwatch.core.recorder.layout import HeadField, file_name
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.run_folder import process_file
from gpuwatch.core.wire.pipe import WorkersEnded, WorkersStarted
from gpuwatch.launcher.run.run_ranks import HostRanks


def record(monkeypatch, pid, path, attempt=0, **fields):
    """What such a process would leave as rank 0."""
    with monkeypatch.context() as patch:
        patch.setattr(recorder_file.os, "getpid", lambda: pid)
        sizes = {"log_bytes": 1 << 16, "segments": 2}
        made = writer.RecorderWriter(path, rank=0, local_rank=0, world_size=1, attempt=attempt, **sizes)
    for name, value in fields.items():
        made.fields[HeadField[name]] = value
    made.close()


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_had_a_model_and_no_optimizer_is_a_rank_whose_end_is_known(tmp_path, monkeypatch, code):
    """It is known to be a rank when it has ended: nobody watched its process, and the run has its code."""
    command = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    command.wait()
    record(monkeypatch, command.pid, tmp_path / process_file(command.pid))
    told, ended = [], []
    ranks = HostRanks(tmp_path, told.append, lambda *end: ended.append(end))

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
    ranks = HostRanks(tmp_path, told.append, lambda *end: None)
    ranks.poll({command.pid: None})

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
    ranks = HostRanks(tmp_path, told.append, lambda *end: ended.append(end))
    ranks.poll({command.pid: None})
    record(monkeypatch, command.pid, tmp_path / path(1), attempt=1)
    ranks.poll({command.pid: None})
    assert ended == ([(0, 0, 0)] if becomes == "ranks" else [])

    command.communicate(b"\n")
    ranks.last_look({command.pid: command.returncode})

    assert ended == [(0, 0, 0), (1, 0, 3)]
    assert [(type(each), each.attempt) for each in told if isinstance(each, WorkersStarted)] == [
        (WorkersStarted, 0),
        (WorkersStarted, 1),
    ]
    ranks.close()


@pytest.fixture
def waiting():
    """Processes that end when they are told a code."""
    made = []

    def start() -> subprocess.Popen:
        made.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(int(input()))"], stdin=subprocess.PIPE))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


def to_the_end(ranks: HostRanks) -> None:
    """As a run does it: until each rank was seen to end."""
    ranks.last_look({})
    while ranks.running:
        time.sleep(0.01)
        ranks.last_look({})


def number_of(process) -> int:
    return number_of_process(process.pid, host_name())


def test_of_two_that_train_without_a_group_one_is_the_rank_and_the_other_has_its_own_row(
    tmp_path, monkeypatch, waiting
):
    first, second = waiting(), waiting()
    for process in (first, second):
        record(monkeypatch, process.pid, tmp_path / process_file(process.pid), STEP=3, BATCH=2)
    told, ended = [], []
    ranks = HostRanks(tmp_path, told.append, lambda *end: ended.append(end))
    for _ in range(2):
        ranks.poll({})
    assert [each.pids for each in told] == [{0: first.pid}, {number_of(second): second.pid}]
    assert ranks.running == [0], "a process that is no rank is not waited for"

    first.communicate(b"0\n")
    second.communicate(b"3\n")
    to_the_end(ranks)

    assert sorted(ended) == [(0, number_of(second), 3), (0, 0, 0)]
    reader = RecorderReader(tmp_path / file_name(number_of(second), 0))
    assert reader.pid == second.pid
    reader.close()
    ranks.close()


def test_a_process_that_only_made_a_model_is_not_in_the_report_and_one_that_called_it_is_once_it_has_ended(
    tmp_path, monkeypatch, waiting
):
    rank, made, called = waiting(), waiting(), waiting()
    record(monkeypatch, rank.pid, tmp_path / file_name(0, 0), STEP=3, BATCH=2)
    record(monkeypatch, made.pid, tmp_path / process_file(made.pid))
    record(monkeypatch, called.pid, tmp_path / process_file(called.pid), BATCH=0)
    told = []
    ranks = HostRanks(tmp_path, told.append, lambda *end: None)
    for _ in range(2):
        ranks.poll({})
    assert [each.pids for each in told] == [{0: rank.pid}]

    for process in (rank, made, called):
        process.communicate(b"0\n")
    to_the_end(ranks)

    started = [number for each in told if isinstance(each, WorkersStarted) for number in each.pids]
    assert [pid_of_number(number) for number in started if number < 0] == [called.pid]
    assert {number for each in told if isinstance(each, WorkersEnded) for number in each.codes} == set(started)
    ranks.close()
