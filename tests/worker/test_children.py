"""Children of a rank that train or call modules unwatched: real processes, below a process with a real recorder."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from torch import nn, multiprocessing as mp
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.worker.session import open_session

def train(*_):
    model = nn.Linear(2, 1)
    model(torch.ones(2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

def call(*_):
    nn.Linear(2, 1)(torch.ones(2))

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, n): return nn.ReLU()(torch.ones(2))

def child(method, target):
    process = mp.get_context(method).Process(target=target)
    process.start()
    process.join()
    print("child", process.pid, process.exitcode)

def grandchild(method):
    process = mp.get_context("fork").Process(target=train)
    process.start()
    process.join()
    print("child", process.pid, process.exitcode, flush=True)

if __name__ == "__main__":
    folder, how = sys.argv[1:]
    session = open_session(WorkerSettings(folder, on_overflow="continue"), Path(folder, "r"), 0, 0, 1)
    session.attach_hooks()
    if how == "loader":
        assert len(list(torch.utils.data.DataLoader(Data(), num_workers=2))) == 4
    elif how == "pool":
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
            assert pool.submit(abs, -1).result() == 1
    elif how == "fork in fork":
        if not os.fork():
            grandchild("fork")
            os._exit(0)
        os.wait()
    else:
        method, what = how.split()
        child(method, {"trains": train, "calls": call}[what])
    fields = session.recorder.fields
    print("seen", fields[HeadField.UNSEEN_CHILD], fields[HeadField.CALLING_CHILD], session.hooks is not None)
"""


def run(tmp_path, how):
    """(process id of the child that was noted as training, as calling, that of the child that there was)"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path, how], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    (seen,) = [line[1:] for line in lines if line[0] == "seen"]
    assert seen[2] == "True"
    children = [line[1:] for line in lines if line[0] == "child"]
    assert all(code == "0" for _, code in children)
    return int(seen[0]), int(seen[1]), int(children[0][0]) if children else 0


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["fork trains", "fork in fork", "spawn trains", "forkserver trains"])
def test_a_child_that_trains_is_noted_in_the_recorder_of_its_parent(tmp_path, how):
    trains, calls, child = run(tmp_path, how)
    assert trains == calls == child > 0


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["fork calls", "spawn calls"])
def test_so_is_one_that_only_calls_a_module(tmp_path, how):
    trains, calls, child = run(tmp_path, how)
    assert (trains, calls) == (0, child)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["loader", "pool"])
def test_a_helper_is_not_noted(tmp_path, how):
    assert run(tmp_path, how)[:2] == (0, 0)
