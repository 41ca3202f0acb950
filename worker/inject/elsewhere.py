"""A Python of another host than that of its `gpuwatch run`: it joins through the file that GPUWATCH_JOIN names."""

from __future__ import annotations

import os
import socket
import subprocess

from ...core.imports.own_imports import own_command
from ...core.recorder.run_folder import JOIN_VARIABLE, RUN_VARIABLE
from ...core.text.tell import tell

_PATIENCE_S = 60.0
_JOIN = f"{__package__.partition('.')[0]}.launcher.run.join"


def join(path: str) -> str | None:
    """The folder in which this host's ranks are recorded; None, and a sentence on stderr, if there can be none."""
    environ = {name: value for name, value in os.environ.items() if name not in (JOIN_VARIABLE, RUN_VARIABLE)}
    try:
        done = subprocess.run(
            own_command(_JOIN, path),
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        folder, why = done.stdout.strip(), done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        folder, why = "", str(error)
    if folder and os.path.isdir(folder):  # noqa: PTH112  # a path is needed as text
        return folder
    last = why.splitlines()[-1:] or ["no answer"]
    tell(f"gpuwatch: process {os.getpid()} on {socket.gethostname()} goes on unwatched: {last[0]}")
    return None
