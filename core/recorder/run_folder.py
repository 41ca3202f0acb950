"""What `gpuwatch run` hands to the processes below it: a variable that names its scratch folder, and files in it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..settings import WorkerSettings

RUN_VARIABLE = "GPUWATCH_RUN"
"""The scratch folder of the run. worker/inject/path/sitecustomize.py, which may import nothing, has it by this name."""
_SETTINGS = "settings.json"
_PROCESS = "process-{pid}.recorder"
PROCESSES = _PROCESS.format(pid="*")
RANKS = "rank-*.recorder"
UNWATCHED = "unwatched-*"
"""Why a Python process could not be watched."""


def write_settings(folder: Path, settings: WorkerSettings) -> None:
    """What the ranks are told. It is there, whole, or not at all."""
    new = folder / f".{_SETTINGS}"
    new.write_text(settings.to_json())
    new.replace(folder / _SETTINGS)


def read_settings(folder: Path) -> WorkerSettings | None:
    """None if that run is over."""
    try:
        return msgspec.json.decode((folder / _SETTINGS).read_bytes(), type=WorkerSettings)
    except OSError:
        return None


def process_file(pid: int) -> str:
    """Name of the recorder of a process that may become a rank, or not."""
    return _PROCESS.format(pid=pid)
