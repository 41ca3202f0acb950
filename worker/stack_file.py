"""Lets the node agent ask this rank for its stack, whatever it waits for, and records the stack at a fatal signal.

See core/stalls.py. faulthandler keeps the number of a descriptor, and at a signal writes into whatever file has that
number then. So the number is one that no file of the script gets (core/own_files.py), and it is checked after each
batch and each fork: if it belongs to another file, faulthandler drops it.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.own_files import OwnDescriptor
from ..core.stalls import MAY_BE_ASKED, asking_signal, stack_file_name
from .patches import PatchLedger

_answering: _StackFile | None = None
"""The file that this process answers into."""


def answer_with_stacks(folder: Path, rank: int, attempt: int) -> None:
    """Register the handlers; their file stays open. Raises OSError if the file cannot be made.

    Only the main thread's stack is written, since the signal interrupts it: another thread's could change meanwhile.
    If the signal already has a handler, or the script sets one later, that handler stays and the agent does not ask. A
    faulthandler that is already enabled stays, too. The effect of a fatal signal on the process does not change. If the
    limit of open files leaves no number that is out of the script's reach, there is no answer.
    """
    global _answering
    number = asking_signal()
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    file = OwnDescriptor(folder / stack_file_name(rank, attempt), flags)
    if not file.is_out_of_reach:
        file.close()
        return
    _answering = _StackFile(file, number)
    os.register_at_fork(after_in_child=look_at_stack_file)


def look_at_stack_file() -> None:
    """Write no stack any more once the script has closed the file or has its number. Never raises."""
    if _answering is not None and not _answering.file.is_ours:
        _answering.let_go()


class _StackFile:
    """The handlers that write into it."""

    def __init__(self, file: OwnDescriptor, number: int) -> None:
        self.file = file
        self._number = number
        faulthandler.register(number, file=file.number, all_threads=False, chain=False)
        _give_way(number, file.path)
        self._is_enabled = not faulthandler.is_enabled()
        if self._is_enabled:
            faulthandler.enable(file=file.number, all_threads=False)

    def let_go(self) -> None:
        """Stop writing, and forbid the agent to ask: without a handler, the signal would end the process."""
        global _answering
        _answering = None
        _ask_no_more(self.file.path)
        faulthandler.unregister(self._number)
        if self._is_enabled:
            faulthandler.disable()


def _give_way(number: int, path: Path) -> None:
    """Mark in the file's permissions that the script has set its own handler for the signal."""

    def around(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def set_handler(signalnum: Any, handler: Any) -> Any:
            if signalnum == number:
                _ask_no_more(path)
            return before(signalnum, handler)

        return set_handler

    PatchLedger().replace(signal, "signal", around)


def _ask_no_more(path: Path) -> None:
    with suppress(OSError):
        path.chmod(0o600 & ~MAY_BE_ASKED)
