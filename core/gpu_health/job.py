"""Which processes are of this job: all that torchrun has started with the same rendezvous, on this host."""

from __future__ import annotations

import os

import psutil

_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""torchrun gives them to every rank, and what a rank starts has them from it."""


def is_of_this_job(pid: int) -> bool:
    """Whether it has this process's torchrun variables, or started it, or was started by it.

    Another user's process does not show its variables, and is not of this job. Raises psutil.NoSuchProcess.
    """
    process = psutil.Process(pid)
    if pid == os.getpid():
        return True
    try:
        theirs = process.environ()
    except psutil.AccessDenied:
        return False
    mine = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if mine:
        return all(theirs.get(name) == value for name, value in mine.items())
    return any(ancestor.pid == pid for ancestor in psutil.Process().parents())
