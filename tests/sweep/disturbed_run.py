"""One run of light ranks in which one call fails, and what became of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # sweep.py is a script

from forks import LAUNCH, Forks

HERE = Path(__file__).parent
MARK = "TEST_RUN_MARK"
DEADLINE_S = 240.0
"""A launch that takes longer does not end."""
GONE_S = 60.0
"""For what a launch leaves to itself: a collector that waits for its agents."""
KINDS = ("write", "open", "map", "sync", "send", "alloc", "thread")
ROLES = ("recorder", "agent", "collector", "launcher")
PARTS = ("start", "work")
ERRNO = {"write": 28, "open": 24, "map": 12, "sync": 5, "send": 32, "alloc": 12, "thread": 11}
"""ENOSPC, EMFILE, ENOMEM, EIO, EPIPE, ENOMEM, EAGAIN"""
_SHAPE = struct.Struct(f"={5 * len(PARTS) * len(KINDS)}QQ256s")
_REMOVED = ("GPUWATCH", "TORCHELASTIC", "PET_", "SLURM")
BATCHES = 6
OVERFLOW = 1, 3
"""Its rank, and the batch."""
_AT = ["--overflow", *map(str, OVERFLOW)]
JOBS = {
    "clean": ([], []),
    "overflow": ([], _AT),
    "goes on": (["--on-overflow", "continue"], [*_AT, "--goes-on"]),
}
"""By name: options of the launch, arguments of the script."""


@dataclass(frozen=True)
class Failure:
    """The `n`-th call fails; 0: none does. `lasting`: and all later ones of its role."""

    role: str = ""
    part: str = "work"
    kind: str = ""
    n: int = 0
    lasting: bool = False
    errno: int = 0

    def env(self) -> dict[str, str]:
        """As the library reads it."""
        return {
            "SWEEP_ROLE": self.role,
            "SWEEP_PART": self.part,
            "SWEEP_KIND": self.kind,
            "SWEEP_NTH": str(self.n),
            "SWEEP_LASTING": str(int(self.lasting)),
            "SWEEP_ERRNO": str(self.errno or ERRNO.get(self.kind, 0)),
        }

    def __str__(self) -> str:
        which = f"{self.kind} {self.n} and later" if self.lasting else f"{self.kind} {self.n}"
        return f"{self.role}, {self.part}, {which}, errno {self.errno or ERRNO.get(self.kind, 0)}"


@dataclass
class Outcome:
    """The results and remains of a launch that has ended."""

    job: str
    failure: Failure
    code: int | None
    """None: it did not end."""
    said: str
    report: dict[str, Any] | None
    losses: dict[int, str]
    """rank -> what its script has written at its end"""
    left: list[str]
    """Processes, folders and files that gpuwatch left behind without saying so."""
    calls: dict[tuple[str, str, str], int]
    """(role, part, kind) -> how many calls there were"""
    failed: int
    first: str
    """The first call that failed."""
    seconds: float


def compile_shim(folder: Path) -> Path:
    """The library of fail_nth.c."""
    made = folder / "fail_nth.so"
    source = str(HERE / "fail_nth.c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", made, source, "-ldl"], check=True)
    return made


def new_counts(place: Path) -> None:
    """What the library writes into."""
    (place / "counts").write_bytes(bytes(_SHAPE.size))
    (place / "made").touch()


def environment(place: Path, failure: Failure) -> dict[str, str]:
    """Environment variables of a launch in this folder."""
    return {
        "TMPDIR": str(place / "tmp"),
        "SWEEP_COUNTS": str(place / "counts"),
        "SWEEP_MADE": str(place / "made"),
        "SWEEP_OURS": f"/dev/shm/gpuwatch-:{place}/tmp/gpuwatch-:{place}/gpuwatch-runs:/dev/null",
        **failure.env(),
    }


def counts_of(place: Path) -> tuple[dict[tuple[str, str, str], int], int, str]:
    """How many calls there were by (role, part, kind), how many of them failed, and what the first of those was."""
    *numbers, failed, first = _SHAPE.unpack((place / "counts").read_bytes())
    names = [(role, part, kind) for role in ("", *ROLES) for part in PARTS for kind in KINDS]
    return dict(zip(names, numbers, strict=True)), failed, first.partition(b"\0")[0].decode(errors="replace")


@dataclass
class Launches:
    """Starts launches, one after another, in `folder`."""

    folder: Path

    def __enter__(self) -> Launches:
        shim = str(compile_shim(self.folder))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_REMOVED)}
        self._env = {**clean, "LD_PRELOAD": shim, "OMP_NUM_THREADS": "1"}
        self._forks = Forks(*LAUNCH, env=self._env)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forks.__exit__(kind, error, trace)

    def run(self, job: str, failure: Failure) -> Outcome:
        """One launch to its end, and a look at what it leaves behind."""
        place = self.folder / "run"
        shutil.rmtree(place, ignore_errors=True)
        (place / "tmp").mkdir(parents=True)
        new_counts(place)
        mark = uuid.uuid4().hex
        env = {**self._env, MARK: mark, **environment(place, failure)}
        options, arguments = JOBS[job]
        script = [str(HERE / "light_rank.py"), str(BATCHES), *arguments]
        argv = ["gpuwatch", "launch", "--standalone", "--nproc-per-node", "2", "--preflight", "off", *options, *script]
        began = time.monotonic()
        shim = self._env["LD_PRELOAD"]
        pid = self._forks.start(argv, cwd=str(place), env=env, log=str(place / "said"), shim=shim)
        code = self._forks.code(pid, DEADLINE_S)
        if code is None:
            os.kill(pid, signal.SIGKILL)
        left = _processes(mark)
        return self._outcome(job, failure, place, code, left, time.monotonic() - began)

    @staticmethod
    def _outcome(job: str, failure: Failure, place: Path, code: int | None, left: list[str], seconds: float) -> Outcome:
        said = (place / "said").read_text(errors="replace")
        reports = sorted(place.glob("gpuwatch-runs/*/report.json")) + sorted(place.glob("tmp/gpuwatch-re*/report.json"))
        losses = {rank: path.read_text() for rank in range(2) if (path := place / f"losses-{rank}").exists()}
        for path in (place / "made").read_text().splitlines():
            told = path in said and Path(path).name.startswith(("gpuwatch-rescued-", "gpuwatch-report-"))
            if Path(path).exists() and not told and not path.startswith(f"{place}/gpuwatch-runs"):
                left.append(path)
                if path.startswith("/dev/shm/gpuwatch-"):
                    shutil.rmtree(path, ignore_errors=True)
        report = json.loads(reports[-1].read_bytes()) if reports else None
        return Outcome(job, failure, code, said, report, losses, left, *counts_of(place), seconds)


def _processes(mark: str) -> list[str]:
    """Command lines of those that do not end; they are killed."""
    found = [process for process in psutil.process_iter() if _has(process, mark)]
    _, alive = psutil.wait_procs(found, timeout=GONE_S)
    lines = []
    for process in alive:
        try:
            lines.append(" ".join(process.cmdline()))
            process.kill()
        except psutil.Error:
            pass
    return lines


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
