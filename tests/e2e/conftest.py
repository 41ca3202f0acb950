"""Starts the real command as a user would, and checks that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpuwatch.cli.main import main

from ..ports import ports_of_this_test

SCRIPTS = Path(__file__).parent / "scripts"
MARK = "TEST_RUN_MARK"
TIMEOUT_S = 400


@dataclass
class Run:
    """A finished command."""

    code: int
    stdout: str
    stderr: str
    cwd: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.cwd / "gpuwatch-runs" / "latest" / "report.json").read_text())

    @property
    def verdict(self) -> dict[str, Any]:
        return self.report["verdict"]


@dataclass
class Bench:
    """A folder to run commands in, and an environment that marks every process they start."""

    cwd: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    """More of the environment."""

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self.started}

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if name not in self.removed()}
        return {**clean, MARK: self.mark, "OMP_NUM_THREADS": "1", **self.extra}

    @staticmethod
    def removed() -> list[str]:
        """Variables of a job that the tests themselves may be part of."""
        return [name for name in os.environ if name.startswith(("GPUWATCH", "TORCHELASTIC", "PET_", "SLURM"))]

    def script(self, name: str) -> str:
        return str(SCRIPTS / name)

    def start(self, *command: str, **more: Any) -> subprocess.Popen[str]:
        """A module, by `python -m`. For the rest see `start_program`."""
        return self.start_program(sys.executable, "-m", *command, **more)

    def start_program(self, *command: str, in_background: bool = False, **environment: str) -> subprocess.Popen[str]:
        """A PYTHONPATH in `environment` comes before the PYTHONPATH that the tests themselves were started with.

        `in_background`: SIGINT is ignored, as in what a shell script starts with `&`; else it is not, however the tests
        themselves were started.
        """
        if "PYTHONPATH" in environment and "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        process = subprocess.Popen(
            command,
            cwd=self.cwd,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_ignore_interrupt if in_background else _hear_interrupt,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> Run:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for left in self.processes():
                left.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"did not end within {timeout_s:.0f} s\n{stdout}\n{stderr}")
        print(stderr)
        return Run(process.returncode, stdout, stderr, self.cwd)

    def gpuwatch(self, *arguments: str, **environment: str) -> Run:
        return self.finish(self.start("gpuwatch.cli.main", *arguments, **environment))

    def launch(self, script: str, *options: str, nproc: int = 2, args: tuple[str, ...] = (), **environment: str) -> Run:
        return self.gpuwatch(
            "launch", "--nproc-per-node", str(nproc), *options, str(SCRIPTS / script), *args, **environment
        )

    def torchrun(self, *arguments: str, **environment: str) -> Run:
        return self.finish(self.start("torch.distributed.run", *arguments, **environment))

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def running(self, word: str) -> list[psutil.Process]:
        """Our processes that have `word` on their command line."""
        found = []
        for process in self.processes():
            try:
                if word in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _hear_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def scratch_folders(pids: set[int]) -> list[Path]:
    """Folders of recorders that the launches with these pids have left; other jobs of this host have theirs."""
    bases = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    found = []
    for owner in (owner for base in bases for owner in base.glob(f"gpuwatch-{os.getuid()}-*/owner")):
        try:
            words = owner.read_text().split()
        except FileNotFoundError:  # another job's, which has ended since the folder was listed
            continue
        if words and int(words[0]) in pids:
            found.append(owner.parent)
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A bench whose commands must leave no process and no shared-memory file behind."""
    bench = Bench(tmp_path)
    yield bench
    left = bench.processes()
    _, alive = psutil.wait_procs(left, timeout=60)
    lines = [" ".join(process.cmdline()) for process in alive]
    for process in alive:
        process.kill()
    for process in bench.started:  # Python would warn another test of one that a failed test has left
        with contextlib.suppress(ValueError):  # its pipes are closed
            process.communicate()
    assert not lines, f"left running: {lines}"
    assert scratch_folders(bench.pids) == []


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`refused("launch", "--nnodes", "two")`: exit code, stdout, stderr of a command that has to start nothing.

    It runs in this process, which has imported torch.
    """
    for name in Bench(tmp_path).removed():
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["gpuwatch", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is free and whose next is, outside of the range from which the kernel gives out ports.

    Both belong to this test until it ends: tests that run beside it get others.
    """
    with ports_of_this_test((number, number + 1) for number in range(20000, 30000, 2)) as (first, _):
        yield first
