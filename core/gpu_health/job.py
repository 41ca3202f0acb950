"""Which processes belong to this job: those that torchrun started on this host with the same rendezvous."""

from __future__ import annotations

import os

import psutil

_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""torchrun sets them for every rank, and a rank's child processes inherit them."""


def is_of_this_job(pid: int) -> bool:
    """Whether a process has this process's torchrun variables, is its ancestor, or is its child.

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
