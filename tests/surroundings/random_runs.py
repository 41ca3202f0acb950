"""Launches of light ranks in random surroundings, by seed: locale, umask, closed files, limits, folders, environment,
signals at random moments, one job or two at once.

    python tests/surroundings/random_runs.py 0 200          the seeds from 0 to 199, a line for each

Right is: no harm (the losses and exit code of torchrun in the same place), no leftover, and nothing false: no clean for
an overflow, no overflow for a healthy run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from gpuwatch.core.recorder.run_folder import remove_stale

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is a script, too

from forks import LAUNCH, Forks

HERE = Path(__file__).parent
LIGHT_RANK = HERE.parent / "sweep" / "light_rank.py"
MARK = "TEST_RUN_MARK"
DEADLINE_S = 180.0
GONE_S = 60.0
BATCHES = 4
_ROOMS = ("cli", "collector", "core", "launcher", "slurm", "worker")
_REMOVED = ("GPUWATCH", "TORCHELASTIC", "PET_", "SLURM")
_LOCALES: list[dict[str, str]] = [
    {},
    {"LC_ALL": "C"},
    {"LC_ALL": "POSIX"},  # with another encoding of names, a fork would differ from its own children: test_places.py
    {"LC_ALL": "no_SUCH.locale", "LANG": "xx"},
    {"PYTHONIOENCODING": "ascii"},
]
_ENVIRONMENTS: list[dict[str, str | None]] = [
    {},
    {"HOME": None},
    {"HOME": "/no/such/home", "USER": None, "LOGNAME": None},
    {"TERM": None, "COLUMNS": "0"},
    {"PYTHONUNBUFFERED": "1", "PYTHONOPTIMIZE": "2"},
    {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "default"},
    {"PYTHONFAULTHANDLER": "1", "PYTHONDEVMODE": "1"},
    {"TZ": "Nowhere/Land", "NO_COLOR": "1"},
    {"TMPDIR": "/no/such/folder"},
    {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
]
_NAMES = ["run", "a b", "Grüße", os.fsdecode(b"w\xff"), "new\nline", "-x", "$(true)", "100%", "'q\"", "x" * 120]
_LIMITS: list[dict[str, int]] = [
    {},
    {},
    {"RLIMIT_NOFILE": 256},
    {"RLIMIT_NOFILE": 64},
    {"RLIMIT_NOFILE": 40},
    {"RLIMIT_CORE": 0},
    {"RLIMIT_MEMLOCK": 0},
    {"RLIMIT_FSIZE": 64 << 20},
    {"RLIMIT_FSIZE": 1 << 20},
    {"RLIMIT_STACK": 1 << 20},
]
_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH, signal.SIGCONT]


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of one job."""

    env: dict[str, str | None]
    name: str
    """Its folder's name."""
    umask: int
    closed: list[int]
    limits: dict[str, int]
    signal: int
    """0: none comes."""
    at: int
    """The batch at which it comes; -1: once the command has begun."""
    whom: str
    """launch, or the helper that is killed: agent, collector."""
    overflows: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Surroundings:
        whom = rng.choice(["launch", "launch", "launch", "agent", "collector"])
        number = int(rng.choice(_SIGNALS)) if whom == "launch" else int(signal.SIGKILL)
        return cls(
            {**rng.choice(_LOCALES), **rng.choice(_ENVIRONMENTS)},
            rng.choice(_NAMES),
            rng.choice([0o022, 0o077, 0o000, 0o777 & ~0o700, 0o027]),
            rng.choice([[], [], [], [0], [1], [2], [1, 2], [0, 1, 2]]),
            rng.choice(_LIMITS),
            number if rng.random() < 0.5 else 0,
            rng.randrange(-1, BATCHES),
            whom,
            rng.random() < 0.3,
        )


@dataclass
class Ended:
    """A command that has ended, or not."""

    code: int | None
    losses: dict[str, str]
    said: str
    verdict: dict[str, Any] | None
    left: list[str] = field(default_factory=list)


class Job:
    """A command in its surroundings."""

    def __init__(self, folder: Path, surroundings: Surroundings, *, watched: bool) -> None:
        self.surroundings = surroundings
        self.watched = watched
        self.cwd = folder / surroundings.name
        self.cwd.mkdir(parents=True)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self.pid = 0
        self.code: int | None = None
        self._sent = not surroundings.signal or not watched

    @property
    def request(self) -> dict[str, Any]:
        """As tests/forks.py reads it."""
        where = self.surroundings
        env = {name: value for name, value in os.environ.items() if not name.startswith(_REMOVED)}
        for name, value in {
            "TMPDIR": str(self.temporary),
            **where.env,
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
        }.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        starts = ["--standalone", "--nproc-per-node", "2"]
        head = ["gpuwatch", "launch", "--preflight", "off", *starts] if self.watched else ["torchrun", *starts]
        overflow = ["--overflow", "1", "2"] if where.overflows and self.watched else []
        return {
            "argv": [*head, str(LIGHT_RANK), str(BATCHES), *overflow],
            "cwd": str(self.cwd),
            "env": env,
            "umask": where.umask,
            "closed": where.closed,
            "limits": where.limits,
            "log": str(self.cwd.parent / "said"),
        }

    def look(self) -> None:
        """Send the signal when it is due."""
        where = self.surroundings
        if self._sent or self.code is not None:
            return
        there = self.cwd / (f"here-{where.at}-0" if where.at >= 0 else "gpuwatch-runs")
        if not there.exists():
            return
        pids = (
            [self.pid] if where.whom == "launch" else [each.pid for each in self.processes() if self._is_helper(each)]
        )
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, where.signal)
        self._sent = bool(pids)

    def _is_helper(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return any(word.endswith(self.surroundings.whom) and "gpuwatch" in word for word in process.cmdline())
        return False

    def processes(self) -> list[psutil.Process]:
        """All that it has started and that still run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def outcome(self) -> Ended:
        """Once it has ended."""
        said = self.cwd.parent / "said"
        text = said.read_text(errors="replace") if said.exists() else ""
        losses = {path.name: path.read_text() for path in sorted(self.cwd.glob("losses-*"))}
        reports = [*self.cwd.glob("gpuwatch-runs/*/report.json"), *self.temporary.glob("gpuwatch-re*/report.json")]
        verdict = json.loads(reports[-1].read_bytes())["verdict"] if reports else None
        return Ended(self.code, losses, text, verdict, self._left(text))

    def _left(self, said: str) -> list[str]:
        _, alive = psutil.wait_procs(self.processes(), timeout=GONE_S)
        lines = []
        for process in alive:
            with suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
                process.kill()
        if self.code is not None and self.code < 0:  # a signal has killed it, maybe before it had an agent
            remove_stale()
        for base in (Path("/dev/shm"), self.temporary, Path(tempfile.gettempdir()), Path("/var/tmp")):
            for folder in base.glob(f"gpuwatch-{os.getuid()}-*"):
                with suppress(OSError, ValueError, IndexError):  # another job's, which is being made or removed
                    if int((folder / "owner").read_text().split()[0]) == self.pid:
                        lines.append(str(folder))
        told = ("gpuwatch-report-", "gpuwatch-rescued-")
        lines += [
            str(path)
            for path in self.temporary.glob("gpuwatch-*")
            if path.name.startswith(told) and str(path) not in said and 2 not in self.surroundings.closed
        ]
        return lines


def run(forks: Forks, jobs: list[Job]) -> None:
    """To their ends, or until they have had their time."""
    for job in jobs:
        job.pid = forks.start(**job.request)
    deadline = time.monotonic() + DEADLINE_S
    while any(job.code is None for job in jobs) and time.monotonic() < deadline:
        for job in jobs:
            job.code = forks.code(job.pid)
            job.look()
        time.sleep(0.02)
    for job in jobs:
        if job.code is None:
            for process in job.processes():
                process.kill()


def wrongs(job: Job, ended: Ended, control: Ended | None) -> list[str]:
    """What should not be. `control`: of torchrun in the same place, where it was needed."""
    where = job.surroundings
    kind = (ended.verdict or {}).get("kind")
    found = [f"left: {each}" for each in ended.left]
    if ended.code is None:
        return [*found, "it did not end"]
    if where.overflows and ended.code == 0:
        found.append("an overflow, and it is told to be clean")
    if not where.overflows and (kind == "overflow" or ended.code == 4):
        found.append("a healthy run, and it is told to have an overflow")
    own = any(f'File "{HERE.parents[1] / room}/' in ended.said for room in _ROOMS)
    if own and "ChildFailedError" not in ended.said:  # which is torchrun's, printed as it prints it
        found.append("a traceback of gpuwatch's own")
    if control is not None and (ended.code not in (control.code, 6) or ended.losses != control.losses):
        found.append(f"{ended.code} {ended.losses}, and torchrun has {control.code} {control.losses}")
    return found


def is_plain(job: Job, ended: Ended) -> bool:
    """Whether it ended as a job does that nothing disturbs."""
    return ended.code == 0 and len(ended.losses) == 2


def ends_by_signal(job: Job) -> bool:
    where = job.surroundings
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    return where.whom == "launch" and where.signal in ends


def run_seed(seed: int, forks: Forks, folder: Path, *, verbose: bool = False) -> list[str]:
    """Run one seed's jobs; returns their errors."""
    rng = random.Random(f"surroundings {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    number = rng.choice([1, 1, 2])
    jobs = [Job(folder / str(each), Surroundings.draw(rng), watched=True) for each in range(number)]
    run(forks, jobs)
    found = []
    for each, job in enumerate(jobs):
        ended = job.outcome()
        control = None
        if not is_plain(job, ended) and not ends_by_signal(job) and not job.surroundings.overflows:
            bare = Job(folder / f"control-{each}", job.surroundings, watched=False)
            run(forks, [bare])
            control = bare.outcome()
        if verbose:
            print(f"  {ended.code} {(ended.verdict or {}).get('kind')} {job.surroundings}", flush=True)
        trouble = wrongs(job, ended, control)
        if trouble:
            found.append(f"{job.surroundings}: {trouble}\n{ended.said[-3000:]}")
    return found


def main() -> None:
    first, end = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder, Forks(*LAUNCH) as forks:
        for seed in range(first, end):
            began = time.monotonic()
            found = run_seed(seed, forks, Path(folder) / "jobs", verbose=True)
            print(f"seed {seed}: {'; '.join(found) or 'right'} ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
