"""What `gpuwatch run` hands to processes below it: variables that name its files, and those of its scratch folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ..settings import WorkerSettings

RUN_VARIABLE = "GPUWATCH_RUN"
"""The scratch folder of the run. worker/inject/path/sitecustomize.py, which may import nothing, has it by this name."""
JOIN_VARIABLE = "GPUWATCH_JOIN"
"""The file by which other hosts join the run (core/wire/join.py). sitecustomize.py has it by this name, too."""
_SETTINGS = "settings.json"
_PROCESS = "process-{pid}.recorder"
PROCESSES = _PROCESS.format(pid="*")
LATER_PROGRAMS = _PROCESS.format(pid="*-*")
"""Of processes that have gone on as another program (os.exec), which is watched again."""
RANKS = "rank-*.recorder"
UNWATCHED = "unwatched-*"
"""Why a Python process could not be watched."""


def env() -> dict[str, str]:
    """What a launcher that starts ranks in an environment of its own is to give to them; {} outside of `gpuwatch run`.

        ray.init(runtime_env={"env_vars": gpuwatch.env()})

    The values are paths, and no secret. Ranks of other hosts join a run that was started with `--other-hosts`.
    """
    if not os.environ.get(RUN_VARIABLE):
        return {}
    names = (JOIN_VARIABLE, RUN_VARIABLE, "PYTHONPATH")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


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


def process_file(pid: int, programs: int = 0) -> str:
    """Name of the recorder of a process that may become a rank, or not. So many programs had it before (os.exec)."""
    return _PROCESS.format(pid=f"{programs}-{pid}" if programs else pid)
