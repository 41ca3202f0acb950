"""Every path that a run writes is a property of one object."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..core.own_files import read_regular

LATEST = "latest"


@dataclass(frozen=True)
class RunPaths:
    """The folder of one run."""

    folder: Path

    @property
    def run_id(self) -> str:
        """Name of the run: its start (local time) and four random hex digits."""
        return self.folder.name

    @property
    def store(self) -> Path:
        """Everything that was received."""
        return self.folder / "run.sqlite"

    @property
    def report_json(self) -> Path:
        """The report for programs."""
        return self.folder / "report.json"

    @property
    def report_text(self) -> Path:
        """The report as it was printed."""
        return self.folder / "report.txt"

    @property
    def report_html(self) -> Path:
        """The report as a page."""
        return self.folder / "report.html"

    @property
    def exit_code(self) -> Path:
        """The exit code of the launches as a number, for scripts."""
        return self.folder / "exit-code"

    @property
    def logs(self) -> Path:
        """The logs of gpuwatch's own processes."""
        return self.folder / "logs"


def new_run(runs_dir: Path, name: str = "") -> RunPaths:
    """Make the private folder of a new run and point `latest` at it. Raises OSError when it cannot be made.

    A name that is taken gets a number: `pretrain`, `pretrain-2`.
    """
    for number in itertools.count(1):
        chosen = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if name:
            chosen = name if number == 1 else f"{name}-{number}"
        paths = RunPaths(runs_dir / chosen)
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            paths.folder.mkdir(mode=0o700)  # never one that is there: somebody may have put links into it
        except FileExistsError:
            if not runs_dir.is_dir():
                raise
            continue
        try:
            paths.logs.mkdir()
        except OSError:
            paths.folder.rmdir()
            raise
        break
    point_latest(runs_dir, paths.run_id)
    return paths


def point_latest(runs_dir: Path, run_id: str) -> None:
    """Point `latest` at this run. Does nothing on a file system without links."""
    link = runs_dir / f".{LATEST}-{os.getpid()}"
    try:
        link.symlink_to(run_id)
        link.replace(runs_dir / LATEST)
    except OSError:
        link.unlink(missing_ok=True)


MOST_REPORT_BYTES = 1 << 30


# The runs of a folder with what they came to, the newest last.


class ListedVerdict(msgspec.Struct, frozen=True):
    """What a list shows of a verdict."""

    kind: str
    certainty: str
    statement: str


class ListedInfo(msgspec.Struct, frozen=True):
    """What a list shows of a job."""

    world_size: int
    nnodes: int
    started: str | None
    ended: str | None


class ListedRun(msgspec.Struct, frozen=True):
    """One run. `run` and `verdict` are None where it has no report (yet)."""

    id: str
    run: ListedInfo | None = None
    verdict: ListedVerdict | None = None


class _RunSummary(msgspec.Struct, frozen=True):
    run: ListedInfo
    verdict: ListedVerdict


def list_runs(runs_dir: Path) -> list[ListedRun]:
    """All of them, by the time of their folders; [] without such a folder."""
    folders = [path for path in runs_dir.glob("*") if path.is_dir() and not path.is_symlink()]
    runs = [RunPaths(path) for path in folders]
    found = [paths for paths in runs if paths.store.exists() or paths.report_json.exists()]
    return [_listed(paths) for paths in sorted(found, key=lambda paths: (paths.folder.stat().st_ctime, paths.run_id))]


def _listed(paths: RunPaths) -> ListedRun:
    try:
        report = msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=_RunSummary)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ListedRun(paths.run_id)
    return ListedRun(paths.run_id, report.run, report.verdict)
