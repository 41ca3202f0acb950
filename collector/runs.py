"""The runs of a folder with what they came to, the newest last."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..core.wire.regular_file import read_regular
from .paths import RunPaths
from .report_file import MOST_REPORT_BYTES


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


class _Report(msgspec.Struct, frozen=True):
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
        report = msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=_Report)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ListedRun(paths.run_id)
    return ListedRun(paths.run_id, report.run, report.verdict)
