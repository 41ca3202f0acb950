"""Lets the node agent ask this rank for its stack, and for what torch's flight recorder of NCCL has: see
core/recorder/stalls.py. Records the stack at a fatal signal, too.

faulthandler keeps the number of a descriptor, and at a signal writes into whatever file has that number then. So the
number is one that no file of the script gets (core/guest/own_files.py), and it is checked after each batch and each
fork: if it belongs to another file, faulthandler drops it.
"""

from __future__ import annotations

import _thread
import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ..core.guest.own_files import OwnDescriptor, write_whole
from ..core.recorder.stalls import (
    MAY_BE_ASKED,
    AskingSignals,
    asking_signals,
    file_of,
    pipe_of,
    stack_file_name,
    stack_text,
)
from ..core.signal_errors import suppress_own
from ..core.torch_names import Release
from .patches import PatchLedger

_answering: _StackFile | None = None
"""The file that this process answers into."""


def answer_with_stacks(folder: Path, rank: int, attempt: int) -> None:
    """Register the handlers; their file stays open. Raises OSError if the file cannot be made.

    Only the main thread's stack is written, since the signals interrupt it: another thread's could change meanwhile. If
    a signal already has a handler, or the script sets one later, that handler stays and the agent does not ask. A
    faulthandler that is already enabled stays, too. The effect of a fatal signal on the process does not change. There
    is no answer if the limit of open files leaves no number that is out of the script's reach, or if another thread
    than the main one calls this: it may set no handler.
    """
    global _answering
    signals = asking_signals() if threading.current_thread() is threading.main_thread() else None
    if signals is None or any(signal.getsignal(number) is not signal.SIG_DFL for number in signals):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    file = OwnDescriptor(folder / stack_file_name(rank, attempt), flags)
    if not file.is_out_of_reach:
        file.close()
        return
    _answering = _StackFile(file, signals)
    os.register_at_fork(after_in_child=look_at_stack_file)


def look_at_stack_file() -> None:
    """Write no stack any more once the script has closed the file or has its number. Never raises."""
    if _answering is not None and not _answering.file.is_ours:
        _answering.release()


class _StackFile:
    """The handlers that write into it."""

    def __init__(self, file: OwnDescriptor, signals: AskingSignals) -> None:
        self.file = file
        self._signals = signals
        signal.signal(signals.in_python, answer_in_python)
        # a system call that it interrupts goes on by itself, as with faulthandler's (man 7 signal)
        signal.siginterrupt(signals.in_python, False)
        faulthandler.register(signals.in_c, file=file.number, all_threads=False, chain=False)
        _give_way(signals, file.path)
        self._is_enabled = not faulthandler.is_enabled()
        if self._is_enabled:
            # a watchdog's thread has no Python frame: what the main thread waits in says more
            faulthandler.enable(file=file.number, all_threads=True)

    def release(self) -> None:
        """Stop writing, and forbid the agent to ask: without a handler, the signal would end the process."""
        global _answering
        _answering = None  # the handler in Python stays, and does nothing
        _ask_no_more(self.file.path)
        faulthandler.unregister(self._signals.in_c)
        if self._is_enabled:
            faulthandler.disable()


def answer_in_python(number: int, frame: FrameType | None) -> None:
    """The handler in Python. `frame` is what it interrupts."""
    # in a function of its own: what is raised within the handler itself counts as the script's (core/signal_errors.py)
    _write(frame)


def _write(frame: FrameType | None) -> None:
    with suppress_own(Exception):
        if _answering is not None and _answering.file.is_ours:
            os.write(_answering.file.number, stack_text(frame).encode("utf-8", "backslashreplace"))


def _give_way(signals: AskingSignals, path: Path) -> None:
    """Mark in the file's permissions that the script has set its own handler for one of the signals."""

    def around(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def set_handler(signalnum: Any, handler: Any) -> Any:
            if signalnum in signals:
                _ask_no_more(path)
            return before(signalnum, handler)

        return set_handler

    PatchLedger().replace(signal, "signal", around)


def _ask_no_more(path: Path) -> None:
    with suppress_own(OSError):
        path.chmod(0o600 & ~MAY_BE_ASKED)


# What this rank's devices were given: a thread reads a pipe, and sleeps until the agent writes into it, at a stall.
# Then it needs the GIL, which torch lets go of wherever it waits for a device.

_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_NONE_BY_DEFAULT: Release = (2, 8)
"""Releases before it may record nothing unless they are asked to; it and later ones keep the last 2000 collectives."""
_MODULE = "torch._C._distributed_c10d"


def have_it_recorded(release: Release, *, for_gpus: bool) -> None:
    """Before the first process group: have torch record, if it was built `for_gpus`."""
    if for_gpus and release < _NONE_BY_DEFAULT:
        os.environ.setdefault(_SIZE, "2000")


def answer_about_nccl(folder: Path, rank: int, attempt: int) -> None:
    """Wait for questions in a thread, from the first group of NCCL on: that has threads, too. Twice does no harm.

    Where there can be none, or the limit of open files leaves no number that is out of the script's reach, there is no
    answer.
    """
    pipe = pipe_of(folder, rank, attempt)
    with suppress_own(OSError, RuntimeError):
        os.mkfifo(pipe, 0o600)
        asked = OwnDescriptor(pipe, os.O_RDWR)  # so that it is not at its end while nobody asks
        if asked.is_out_of_reach:
            _thread.start_new_thread(_answer, (asked, file_of(folder, rank, attempt)))  # threading does not list it
        else:
            asked.close()


def _answer(asked: OwnDescriptor, file: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
    with suppress_own(Exception):
        while asked.is_ours and os.read(asked.number, 64):
            dump: Callable[..., bytes] | None = getattr(sys.modules.get(_MODULE), "_dump_nccl_trace", None)
            if dump is not None:
                write_whole(file, dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
