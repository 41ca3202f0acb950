"""Watches a rank's process start children that train or call modules, become another program (os.exec), and end."""

from __future__ import annotations

import atexit
import functools
import os
import posix
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from ..core.recorder.layout import MAGIC, HeadField, RankPhase
from ..core.recorder.writer import RecorderWriter
from ..core.signal_errors import from_outside, suppress_own
from .patches import PatchLedger, after_import, allow_global_hooks

# The two ends of a program that Python does not announce: os.exec puts another one into its process, os._exit ends it.
#
# gpuwatch replaces the functions of `os` to see both. An audit hook would see os.exec as well, but Python calls it for
# every event of the process, id() among them (32 ns without one, 196 ns with an empty one), and it cannot be removed.

Undo = Callable[[], None]
_replaced = False


def hear_of_ends(
    before_exec: Callable[[], Undo],
    before_exit: Callable[[FrameType], None],
    variables: Callable[[Mapping[Any, Any]], dict[str, str]],
) -> None:
    """Call `before_exec` and `before_exit` before such an end, in this process and its forks. They may not raise.

    `before_exec` returns what undoes it: os.exec fails where there is no such file. `before_exit` gets the frame of who
    calls os._exit. `variables` says what else belongs into the environment that the other program is to have. Only the
    first call in a process counts.
    """
    global _replaced
    if _replaced:
        return
    _replaced = True
    real_execv, real_execve, real_exit = os.execv, os.execve, os._exit

    @functools.wraps(real_execv)
    def execv(path: Any, argv: Any, /) -> Any:
        undo, more = before_exec(), variables(os.environ)
        before = {name: os.environ.get(name) for name in more}
        os.environ.update(more)
        try:
            return real_execv(path, argv)
        finally:  # there is no such file
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            undo()

    @functools.wraps(real_execve)
    def execve(path: Any, argv: Any, env: Mapping[Any, Any]) -> Any:
        undo, more = before_exec(), variables(env)
        try:
            return real_execve(path, argv, {**env, **more} if more else env)
        finally:
            undo()

    @functools.wraps(real_exit)
    def _exit(status: int) -> Any:
        if hasattr(status, "__index__"):  # an integer of any kind; else it raises, and the script goes on
            before_exit(sys._getframe(1))
        real_exit(status)

    patches = PatchLedger()
    for place in (os, posix):
        patches.replace(place, "execv", lambda _: execv)
        patches.replace(place, "execve", lambda _: execve)
        patches.replace(place, "_exit", lambda _: _exit)
    if real_execve in os.supports_fd:
        os.supports_fd.add(execve)


# How a process ends that gpuwatch did not start: recorded at its exit, from what Python keeps.
#
# For the script's process Python keeps the exception that nobody caught (sys.last_value), but not the code of a
# SystemExit, which the launcher's side sees from outside. A child of multiprocessing runs its finalizers while the
# exception propagates.


class WatchedRank(Protocol):
    """What records how a rank ends: the session of this process."""

    @property
    def is_ours(self) -> bool:
        """False in a process that the script has forked."""

    def raised(self, error: BaseException) -> object:
        """The script has ended with this exception."""

    def finished(self, code: int) -> None:
        """The script has ended, or has called sys.exit."""

    def raise_kept(self) -> None:
        """The script's code has ended: raise what no hook has raised for it."""

    def settle(self) -> bool:
        """Judge the numbers that have arrived since."""

    def enter(self, phase: RankPhase) -> None:
        """Publish what this rank is doing now."""


def tell_the_end(session: WatchedRank) -> None:
    """Record how this process ends, when it does."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _child_ends, args=(session,), exitpriority=-100)
    else:
        atexit.register(_script_ends, session)


def _script_ends(session: WatchedRank) -> None:
    if not session.is_ours:
        return
    error = getattr(sys, "last_value", None)
    try:
        session.raise_kept()
    except BaseException as kept:
        if not from_outside(kept):
            raise
        error = kept  # too late to end the script with it: it is told of, as Python tells of others
        sys.excepthook(type(kept), kept, kept.__traceback__)
    if isinstance(error, BaseException) and not isinstance(error, SystemExit):
        session.raised(error)
    else:
        session.settle()
        session.enter(RankPhase.FINISHED)


def _child_ends(session: WatchedRank) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and isinstance(error.__context__, Exception):  # torch.multiprocessing.spawn has written it down
            session.raised(error.__context__)
        else:
            session.finished(code)
    elif error is not None:
        session.raised(error)
    else:
        session.finished(0)


# Child processes of a rank that train, or call modules, and are not watched: such a child records this in its parent's
# recorder.
#
# A fork has the recorder mapped. A child that multiprocessing spawns gets its path: a process hands its configuration
# on. Both wait for the first call of a module and for the first step of an optimizer. A compile worker or a pool makes
# none. What a DataLoader's worker computes is read in its parent, as the input of a model.

_KEY = "gpuwatch"
_BEGIN = "try:\n from gpuwatch.worker.session import begin\n begin({path!r}, {pid})\nexcept Exception: pass"
"""The code that a spawned child runs: its Python may have no gpuwatch."""


class _ChildHandle:
    """Pickled in the parent, with the child's process: unpickling it runs `begin`."""

    def __init__(self, recorder: RecorderWriter) -> None:
        self._recorder = recorder

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_BEGIN.format(path=str(self._recorder.path), pid=os.getpid()),)


def watch_children(recorder: RecorderWriter, is_watched: Callable[[], bool]) -> None:
    """Have children of this process write into its recorder when they train, unless they are watched themselves."""

    def forked() -> None:
        with suppress_own(Exception):
            note_when_used(recorder, is_watched)

    os.register_at_fork(after_in_child=forked)
    after_import("multiprocessing.process", lambda: _hand_on(recorder))


def note_when_used(recorder: RecorderWriter, is_watched: Callable[[], bool]) -> None:
    """In a fork of a rank: if it trains or calls modules, and is not watched itself, its parent's recorder says so."""
    wait_for_use(note_in(recorder.fields), is_watched)


def note_in(fields: Any) -> Callable[[HeadField], None]:
    """A function that writes this process's id into a field of its parent's recorder."""
    return lambda field: fields.__setitem__(field, os.getpid())


def _hand_on(recorder: RecorderWriter) -> None:
    config = getattr(sys.modules["multiprocessing.process"].current_process(), "_config", None)
    if isinstance(config, dict):
        config[_KEY] = _ChildHandle(recorder)


def wait_for_use(note: Callable[[HeadField], None], is_watched: Callable[[], bool]) -> None:
    """Call `note` at this process's first call of a module and first step of an optimizer, if nobody watches it."""
    if "torch" not in sys.modules:
        after_import("torch", lambda: wait_for_use(note, is_watched))
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
        with suppress_own(Exception):
            if not is_watched():
                note(HeadField.UNSEEN_CHILD)

    torch_optimizer.register_optimizer_step_post_hook(stepped)
    wait_for_call(note, is_watched)


def wait_for_call(
    note: Callable[[HeadField], None], is_watched: Callable[[], bool], concerns: Callable[[Any], bool] = lambda _: True
) -> None:
    """Call `note` at this process's first call of a module that `concerns` us, if nobody watches it."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def called(module: Any, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        with suppress_own(Exception):
            if concerns(module):
                handle.remove()
                if torch.utils.data.get_worker_info() is None and not is_watched():
                    note(HeadField.CALLING_CHILD)

    allow_global_hooks()
    handle = register_module_forward_pre_hook(called)


def note_at(path: Path, field: HeadField) -> None:
    """The file is looked for only now: a script that closes all descriptors would close one that was kept."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.pread(fd, 8, 8 * HeadField.MAGIC) == struct.pack("<q", MAGIC):
            os.pwrite(fd, struct.pack("<q", os.getpid()), 8 * field)
    finally:
        os.close(fd)
