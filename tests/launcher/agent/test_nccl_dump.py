"""A rank is asked through a real pipe for its flight recorder of NCCL, and answers in a thread.

Only torch's own function is another one, as no torch without CUDA has it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys

import pytest
from gpuwatch.core.recorder.stalls import file_of, pipe_of
from gpuwatch.launcher.agent.rank_stalls import ANSWER_S, NcclDump
from gpuwatch.worker.answers import have_it_recorded

from ...waiting import until

RANK = """
import os, sys, threading, time, types
from pathlib import Path
from gpuwatch.worker.answers import answer_about_nccl
folder, data = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])

def dump(includeCollectives, includeStackTraces, onlyActive):
    assert threading.current_thread() is not threading.main_thread()
    return data

sys.modules["torch._C._distributed_c10d"] = types.SimpleNamespace(_dump_nccl_trace=dump)
answer_about_nccl(folder, 0, 2)
answer_about_nccl(folder, 0, 2)
print(threading.enumerate() == [threading.main_thread()], len(os.listdir("/proc/self/task")), flush=True)
sys.stdin.read()
"""
ENTRY = {
    **{"process_group": ("0", "default_pg"), "collective_seq_id": 5, "p2p_seq_id": 0, "is_p2p": False},
    **{"profiling_name": "nccl:all_reduce", "time_created_ns": 1, "state": "scheduled"},
    **{"input_sizes": [[8]], "input_dtypes": ["Float"]},
}


@pytest.fixture
def rank(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path), pickle.dumps({"entries": [ENTRY]}).hex()]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "True 2\n"
    with child:
        yield child
        child.kill()


def stop(rank):
    """All of its threads rest when this returns: none answers any more."""
    rank.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)


def answered(dump):
    until(lambda: dump.is_due(1.0), "the answer of the rank", lambda: dump.found)
    return dump.found


def test_a_rank_answers_each_question_and_ends_as_before(tmp_path, rank):
    for _ in range(3):
        found = answered(NcclDump(tmp_path, 0, 2, 0.0))

        assert (found["0"].enqueued, found["0"].pending) == (5, 5)
        assert not file_of(tmp_path, 0, 2).exists()
    rank.stdin.close()
    assert rank.wait(60) == 0


def test_an_answer_that_cannot_be_read_is_not_waited_for(tmp_path, rank):
    stop(rank)
    dump = NcclDump(tmp_path, 0, 2, 0.0)
    file_of(tmp_path, 0, 2).write_bytes(b"no pickle")

    assert dump.is_due(0.0)
    assert dump.found is None
    rank.send_signal(signal.SIGCONT)


def test_one_that_is_stopped_is_waited_for_so_long(tmp_path, rank):
    stop(rank)
    dump = NcclDump(tmp_path, 0, 2, 100.0)

    assert not dump.is_due(100.0 + ANSWER_S - 0.1)
    assert dump.is_due(100.0 + ANSWER_S)
    assert dump.found is None
    rank.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("what", ["none", "nobody reads it", "its rank has ended"])
def test_where_nobody_reads_the_pipe_nobody_is_waited_for(tmp_path, rank, what):
    attempt = 2 if what == "its rank has ended" else 1
    if what == "its rank has ended":
        rank.kill()
        rank.wait()
    elif what == "nobody reads it":
        os.mkfifo(pipe_of(tmp_path, 0, attempt))
    dump = NcclDump(tmp_path, 0, attempt, 0.0)

    assert dump.is_due(0.0)
    assert dump.found is None


@pytest.mark.parametrize(
    ("release", "for_gpus", "size"), [((2, 5), True, "2000"), ((2, 5), False, None), ((2, 8), True, None)]
)
def test_a_torch_that_records_nothing_by_default_is_asked_to(monkeypatch, release, for_gpus, size):
    name = "TORCH_NCCL_TRACE_BUFFER_SIZE"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    have_it_recorded(release, for_gpus=for_gpus)
    assert os.environ.get(name) == size
    monkeypatch.setenv(name, "7")
    have_it_recorded(release, for_gpus=for_gpus)
    assert os.environ[name] == "7"
