"""Lets the node agent ask this rank where it stands, whatever it waits for, and where a fatal signal has ended it.

See core/stalls.py.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.stalls import MAY_BE_ASKED, asking_signal, stack_file_name


def answer_with_stacks(folder: Path, rank: int, attempt: int) -> None:
    """Register the handlers; their file stays open. Raises OSError if the file cannot be made.

    Only the main thread's stack is written, as it is the one that is interrupted: another one could change meanwhile.
    A handler that somebody else has for that signal stays, or that the script sets later: nobody asks then. So does a
    faulthandler that is enabled already. What a fatal signal does to the process stays as it is.
    """
    number = asking_signal()
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(folder / stack_file_name(rank, attempt), flags, 0o600)
    faulthandler.register(number, file=file, all_threads=False, chain=False)
    _give_way(number, file)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file, all_threads=False)


def _give_way(number: int, file: int) -> None:
    """Say in the file's permissions when the script has set a handler of its own for the signal."""
    before = signal.signal

    @functools.wraps(before)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        if signalnum == number:
            with suppress(OSError):
                os.fchmod(file, 0o600 & ~MAY_BE_ASKED)
        return before(signalnum, handler)

    signal.signal = set_handler
