"""What lets ranks of other hosts join a run: a file of the run's folder, for its user alone. It has the job's keys."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ..errors import UsageError
from ..settings import WorkerSettings
from .pipe import AgentConfig

NAME = "join.json"


class Join(msgspec.Struct, frozen=True):
    """`addresses` are those of the collector: a host takes one at which it answers."""

    addresses: list[str]
    agent: AgentConfig
    """Of the run's own agent. Another host has another collector's address and other folders in it."""
    settings: WorkerSettings
    meeting_key: str = ""
    """What the ranks seal the values of their preflight with."""


def write_join(folder: Path, join: Join) -> Path:
    """Whole, or not at all. Returns its path. Raises OSError."""
    path = folder / NAME
    new = folder / f".{NAME}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(join))
    new.replace(path)
    return path


def read_join(path: Path) -> Join:
    """Raises UsageError with what there is instead."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Join)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read here ({error.strerror}): the run is over, or its folder is not shared with this "
            "host; share it, or copy that file here"
        ) from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is of another version of gpuwatch: {error}") from error
