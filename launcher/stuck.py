"""Notices a torchrun that cannot see that its ranks have ended, as its rendezvous store is out of reach.

torchrun's agent asks the store before each look at its ranks. If the store's host does not answer, it waits for as long
as TCP goes on trying, a quarter of an hour and more, and no signal ends that wait. A node that was cut off would stay
up, with nothing running on it. (torch 2.5 to 2.13, c10d rendezvous)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import psutil

PATIENCE_S = 60.0
_LOOK_S = 1.0


def watch_torchrun(
    unseen: Callable[[], Collection[psutil.Process]], leave: Callable[[], None], patience_s: float
) -> None:
    """Start a thread that calls `leave` once all of `unseen` have ended for `patience_s`, and torchrun has not told so.

    `unseen` are the ranks of this node of whose end torchrun has not told yet.
    """

    def watch() -> None:
        looks = 0
        while looks * _LOOK_S < patience_s:
            pause.wait(_LOOK_S)
            looks = looks + 1 if (ranks := unseen()) and all(map(_has_ended, ranks)) else 0
        leave()

    pause = threading.Event()
    threading.Thread(target=watch, daemon=True, name="gpuwatch-stuck").start()


def _has_ended(process: psutil.Process) -> bool:
    """A child that nobody has waited for yet is a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
