"""One line for the traceback of a rank that has only lost another one, on a terminal.

After an overflow each rank that waits for the one at fault raises in the same way, and what they print would scroll the
first error away. In a file or a pipe all of it stays. A traceback of the script's own is never folded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..core.codes import Code, coded
from ..core.signal_errors import suppress_own

_CLOSED = {
    "Connection closed by peer": "connection closed by peer",
    "Connection reset by peer": "connection reset by peer",
}
"""What torch.distributed says where the process of another rank has ended, and nowhere else."""


def is_terminal() -> bool:
    """Whether what a rank prints goes to a terminal alone, and to no log."""
    with suppress_own(OSError, ValueError):  # it is closed
        return sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.isatty()
    return False


def folded(error: BaseException, rank: int, hook: Callable[..., Any] | None = None) -> str:
    """The line; "" for an error that is printed whole. `hook` prints exceptions in this process: `sys.excepthook`."""
    hook = hook if hook is not None else sys.excepthook
    if not (hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch.distributed")):
        return ""  # the script prints them in its own way
    if not isinstance(error, RuntimeError) or error.__cause__ is not None or error.__context__ is not None:
        return ""
    message = str(error)
    found = next((text for words, text in _CLOSED.items() if words in message and "gloo" in message), "")
    if not found or not _is_raised_by_torch(error.__traceback__):
        return ""
    return coded(f"rank {rank}: {found} (its traceback: gpuwatch report --rank {rank})", Code.LOST)


def _is_raised_by_torch(trace: TracebackType | None) -> bool:
    """Whether the innermost call is one of torch."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
