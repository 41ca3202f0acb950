"""torch silences what a forward hook raises after the forward has raised: a handler's exception is raised later."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from typing import Any

import gpuwatch
import pytest
import torch
from gpuwatch.core.recorder.reader import RecorderReader
from torch import nn


class Told(Exception):
    """What a handler raises."""


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the script")


@pytest.fixture
def tells(monkeypatch):
    """A signal comes whenever the frame of a call that raised is written."""

    numbers = itertools.count(1)

    def handler(number: int, frame: Any) -> None:
        raise Told(next(numbers))

    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda watched: monkeypatch.setattr(
        watched.hooks._calls, "_leave", lambda *_: signal.raise_signal(signal.SIGUSR1)
    )
    signal.signal(signal.SIGUSR1, before)


def test_it_is_raised_by_the_next_hook(watch, tells, monkeypatch):
    watched = watch()
    model = nn.Sequential(Fails())
    tells(watched)
    with pytest.raises(ValueError, match="of the script"):
        model(torch.ones(2))
    monkeypatch.undo()
    with pytest.raises(Told):
        nn.Identity()(torch.ones(2))
    nn.Identity()(torch.ones(2))
    assert watched.faults == []


def test_an_optimizers_step_raises_it_too(watch, tells, monkeypatch):
    watched = watch()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    tells(watched)
    with pytest.raises(ValueError, match="of the script"):
        Fails()(torch.ones(2))
    monkeypatch.undo()
    with pytest.raises(Told):
        optimizer.step()
    optimizer.step()


def test_two_are_raised_as_python_raises_one_while_the_other_is_handled(watch, tells, monkeypatch):
    watched = watch()
    tells(watched)
    with pytest.raises(ValueError, match="of the script"):
        nn.Sequential(Fails())(torch.ones(2))  # the hook of each of the two modules
    monkeypatch.undo()
    with pytest.raises(Told, match="2") as raised:
        nn.Identity()(torch.ones(2))
    assert repr(raised.value.__context__) == "Told(1)"
    nn.Identity()(torch.ones(2))
    assert watched.faults == []


def test_the_end_of_a_watch_raises_those_that_are_left(tells, monkeypatch):
    with pytest.raises(Told, match="2") as raised, gpuwatch.watch() as watched:
        monkeypatch.setattr(watched._hooks._calls, "_leave", lambda *_: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(ValueError, match="of the script"):
            nn.Sequential(Fails())(torch.ones(2))
    assert repr(raised.value.__context__) == "Told(1)"


def test_so_does_a_watch_that_is_removed(tells, monkeypatch):
    watched = gpuwatch.watch()
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="of the script"):
        patched.setattr(watched._hooks._calls, "_leave", lambda *_: signal.raise_signal(signal.SIGUSR1))
        Fails()(torch.ones(2))
    with pytest.raises(Told):
        watched.remove()
    watched.remove()


RANK = """
import sys
from pathlib import Path
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.__main__ import run
from gpuwatch.worker.session import open_session
session = open_session(WorkerSettings(""), Path("recorder"), 0, 0, 1)
session.attach_hooks()
END
"""
LAUNCHED = "run(['script.py'], session.raised, session.finished, session.raise_kept)"
JOINED = """
from gpuwatch.worker.rank_process import tell_the_end
tell_the_end(session)
exec(open('script.py').read())
"""
SCRIPT = """
import itertools, signal, sys, torch
from gpuwatch.worker.hooks.module_calls import ModuleCalls

class Told(Exception):
    pass

def handler(number, frame, numbers=itertools.count(1)):
    raise Told(next(numbers))

class Fails(torch.nn.Module):
    def forward(self, x):
        raise ValueError("of the script")

signal.signal(signal.SIGUSR1, handler)
ModuleCalls._leave = lambda *_: signal.raise_signal(signal.SIGUSR1)  # one comes in each hook
try:
    torch.nn.Sequential(Fails())(torch.ones(2))
except ValueError:
    print("handled", flush=True)
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("how", "code"), [(LAUNCHED, 1), (JOINED, 0)], ids=["launched", "joined"])
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise RuntimeError('later')"], ids=["end", "exit", "error"])
def test_the_end_of_a_rank_raises_or_tells_those_that_are_left(tmp_path, how, code, end):
    """A process that runs by itself has ended by then: it can only tell."""
    (tmp_path / "script.py").write_text(SCRIPT + end)
    command = [sys.executable, "-W", "ignore", "-c", RANK.replace("END", how)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stdout == "handled\n"
    assert done.stderr.index("Told: 1") < done.stderr.index("Told: 2")
    assert done.returncode == (1 if "raise" in end else code)
    reader = RecorderReader(tmp_path / "recorder")
    errors = [event for event in reader.new_entries()[1] if type(event).__name__ == "ScriptError"]
    reader.close()
    assert [(error.error, error.message) for error in errors] == [("Told", "2")]
