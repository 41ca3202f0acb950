"""The user's command: started as it stands, with its own stdin, stdout and stderr, and ended with its run."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ...core.recorder.run_folder import JOIN_VARIABLE, RUN_VARIABLE

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
"""As a shell exits."""
_PR_SET_PDEATHSIG = 1
"""prctl(2), Linux"""
PATH_FOLDER = str(Path(__file__).parents[2] / "worker" / "inject" / "path")
"""Holds the sitecustomize that makes ranks of processes."""


def environment_of_ranks(scratch: Path, join: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the command: what makes ranks comes first on PYTHONPATH. `join`: other hosts may."""
    paths = [PATH_FOLDER, *filter(None, [environ.get("PYTHONPATH")])]
    of_join = {JOIN_VARIABLE: str(join)} if join is not None else {}
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), RUN_VARIABLE: str(scratch), **of_join}


def why_not_started(program: str) -> tuple[str, int] | None:
    """Why there is no such program to run, and a shell's exit code for it; None if there is one."""
    if shutil.which(program) is not None:
        return None
    if os.sep not in program:
        return "command not found", _NOT_FOUND
    path = Path(program)
    if not path.exists():
        return "no such file", _NOT_FOUND
    return ("is a directory" if path.is_dir() else "permission denied"), _NOT_EXECUTABLE


def start_command(
    command: Sequence[str], environ: Mapping[str, str], blocked: Collection[int]
) -> subprocess.Popen[bytes]:
    """Start it with these signals blocked. The kernel sends it SIGTERM when this process ends, however that is.

    Raises OSError as exec does.
    """
    return subprocess.Popen(command, env=environ, close_fds=False, preexec_fn=_prepare(blocked))


def _prepare(blocked: Collection[int]) -> Callable[[], None]:
    """To be called between fork and exec; what can be loaded before is."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))

    return prepare


def exit_code(own: int, verdict: int, kind: str, *, stopped: bool) -> int:
    """What a run exits with: as its command has, unless there was an overflow, or the run has ended it (`stopped`).

    `own` is the command's code as a shell has it, `verdict` and `kind` are the verdict's. The verdict's counts, too,
    where the command itself has nothing to tell: it has left with 0, and something is wrong or not proven.
    """
    if kind in ("overflow", "preflight"):
        return verdict
    if kind == "interrupted":
        return own
    return verdict if own == 0 or (stopped and verdict) else own


def shell_code(returncode: int) -> int:
    """The exit code that a shell would have for it."""
    return 128 - returncode if returncode < 0 else returncode
