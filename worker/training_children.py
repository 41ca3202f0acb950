"""Child processes of a rank that train, and that nobody watches: such a child says so in its parent's recorder.

A fork has the recorder mapped. What multiprocessing spawns is told where it lies: a process hands its own configuration
on to its children. Both wait for the first step of an optimizer. A DataLoader's worker, a compile worker or a
tokenizer's pool makes none.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.recorder.layout import MAGIC, HeadField
from ..core.recorder.writer import RecorderWriter
from .imports import after_import

_KEY = "gpuwatch"
_BEGIN = "try:\n from gpuwatch.worker.training_children import begin\n begin({path!r}, {pid})\nexcept Exception: pass"
"""What a spawned child runs: that Python may have no gpuwatch."""


class _ChildHandle:
    """Pickled in the parent, with the child's process: unpickling it runs `begin`."""

    def __init__(self, recorder: RecorderWriter) -> None:
        self._recorder = recorder

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_BEGIN.format(path=str(self._recorder.path), pid=os.getpid()),)


def watch_children(recorder: RecorderWriter, is_watched: Callable[[], bool]) -> None:
    """Have children of this process write into its recorder when they train, unless they are watched themselves."""

    def forked() -> None:
        with suppress(Exception):
            wait_for_training(lambda: recorder.fields.__setitem__(HeadField.UNSEEN_CHILD, os.getpid()), is_watched)

    os.register_at_fork(after_in_child=forked)
    after_import("multiprocessing.process", lambda: _hand_on(recorder))


def _hand_on(recorder: RecorderWriter) -> None:
    config = getattr(sys.modules["multiprocessing.process"].current_process(), "_config", None)
    if isinstance(config, dict):
        config[_KEY] = _ChildHandle(recorder)


def begin(path: str, parent: int) -> None:
    """In a child that was spawned by the process of this recorder."""
    if os.getpid() == parent:  # somebody has only made a copy of a process
        return
    from .session import current_hooks

    after_import("torch", lambda: wait_for_training(lambda: _note(Path(path)), lambda: current_hooks() is not None))


def wait_for_training(note: Callable[[], None], is_watched: Callable[[], bool]) -> None:
    """Call `note` at the first step of an optimizer in this process, unless it is watched by then."""
    if "torch" not in sys.modules:
        after_import("torch", lambda: wait_for_training(note, is_watched))
        return
    import torch
    from torch.optim import optimizer as torch_optimizer

    is_over = False

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        """It stays: torch goes through its hooks while it calls this one."""
        nonlocal is_over
        if is_over or torch.compiler.is_compiling():
            return
        is_over = True
        with suppress(Exception):
            if not is_watched():
                note()

    torch_optimizer.register_optimizer_step_post_hook(stepped)


def _note(path: Path) -> None:
    """The file is looked for only now: a script that closes all descriptors would close one that was kept."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.pread(fd, 8, 8 * HeadField.MAGIC) == struct.pack("<q", MAGIC):
            os.pwrite(fd, struct.pack("<q", os.getpid()), 8 * HeadField.UNSEEN_CHILD)
    finally:
        os.close(fd)
