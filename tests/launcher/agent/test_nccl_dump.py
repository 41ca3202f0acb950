"""A rank is asked for its flight recorder through a real pipe: another process reads it, and answers as torch does."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpuwatch.core.recorder.flight_recorder import dumps_in, file_of, pipe_of, pipes_of
from gpuwatch.core.recorder.scratch import keep_dumps, remove_scratch
from gpuwatch.launcher.agent.nccl_dump import ANSWER_S, NcclDump

TORCH = """
import os, sys
pipe, file, data = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
os.mkfifo(pipe)
asked = os.open(pipe, os.O_RDWR)
print("ready", flush=True)
os.read(asked, 128)
with open(file, "wb") as opened:
    for at in range(len(data)):
        opened.write(data[at : at + 1])
        opened.flush()
sys.stdin.read()
"""
ENTRY = {
    **{"process_group": ("0", "default_pg"), "collective_seq_id": 5, "p2p_seq_id": 0, "is_p2p": False},
    **{"profiling_name": "nccl:all_reduce", "time_created_ns": 1, "state": "scheduled"},
    **{"input_sizes": [[8]], "input_dtypes": ["Float"]},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@pytest.fixture
def torch_of(folder):
    children = []

    def start(rank):
        data = pickle.dumps({"entries": [ENTRY]}).hex()
        command = [sys.executable, "-c", TORCH, str(pipe_of(folder, rank)), str(file_of(folder, rank)), data]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child.pid

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_a_rank_answers_and_its_file_is_gone(folder, torch_of):
    dump = NcclDump(folder, 0, torch_of(0), 0.0)
    while not dump.is_due(1.0):
        time.sleep(0.01)

    assert (dump.result()["0"].enqueued, dump.result()["0"].pending) == (5, 5)
    assert dumps_in(folder) == []


def test_one_that_does_not_answer_is_waited_for_so_long(folder, torch_of):
    pid = torch_of(0)
    os.kill(pid, 19)
    dump = NcclDump(folder, 0, pid, 100.0)

    assert not dump.is_due(100.0 + ANSWER_S - 0.1)
    assert dump.is_due(100.0 + ANSWER_S)
    assert dump.result() is None
    os.kill(pid, 18)


@pytest.mark.parametrize("what", ["none", "another process reads it", "a file", "nobody reads it"])
def test_a_rank_without_a_pipe_of_its_own_is_not_waited_for(folder, torch_of, what):
    pid = os.getppid()
    if what == "another process reads it":
        torch_of(0)
    elif what == "a file":
        pipe_of(folder, 0).write_text("")
    elif what == "nobody reads it":
        os.mkfifo(pipe_of(folder, 0))
    dump = NcclDump(folder, 0, pid, 0.0)

    assert dump.is_due(0.0)
    assert dump.result() is None


def test_what_torch_wrote_by_itself_is_kept(folder, torch_of):
    file_of(folder, 0).write_bytes(b"of a timeout")
    dump = NcclDump(folder, 0, torch_of(0), 0.0)
    while not dump.is_due(1.0):
        time.sleep(0.01)
    said = []
    keep_dumps(folder, said.append)
    remove_scratch(folder)

    assert dump.result() is not None
    assert pipes_of(folder) == []
    assert not folder.exists()
    assert Path(said[0].rpartition(" ")[2], "nccl-0.at-timeout").read_bytes() == b"of a timeout"
