"""Lets the node agent ask what this rank's devices were given: torch's flight recorder of NCCL, written into a file.

See core/recorder/flight_recorder.py. A thread reads a pipe, and sleeps until the agent writes into it, at a stall. Then
it needs the GIL, which torch lets go of wherever it waits for a device.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..core.own_files import OwnDescriptor, write_whole
from ..core.recorder.flight_recorder import file_of, pipe_of
from ..core.torch_names import Release

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
    with suppress(OSError, RuntimeError):
        os.mkfifo(pipe, 0o600)
        asked = OwnDescriptor(pipe, os.O_RDWR)  # so that it is not at its end while nobody asks
        if asked.is_out_of_reach:
            _thread.start_new_thread(_answer, (asked, file_of(folder, rank, attempt)))  # threading does not list it
        else:
            asked.close()


def _answer(asked: OwnDescriptor, file: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
    with suppress(Exception):
        while asked.is_ours and os.read(asked.number, 64):
            dump: Callable[..., bytes] | None = getattr(sys.modules.get(_MODULE), "_dump_nccl_trace", None)
            if dump is not None:
                write_whole(file, dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
