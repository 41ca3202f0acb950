"""The thread that reads the host's figures: a file system that does not answer stops it, and nothing else."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from ....core.threads import start_thread
from .cgroup import read_cgroup
from .host import read_disks, read_host
from .infiniband import read_infiniband
from .processes import read_ranks
from .values import Values

_END_S = 1.0
Pids = Sequence[tuple[int, int]]
"""(rank, pid)"""


def read_all(folders: dict[str, Path], pids: Pids) -> Values:
    """Everything that is read of a host without its GPUs: disks last, which may never answer."""
    return {**read_host(), **read_cgroup(), **read_ranks(pids), **read_infiniband(), **read_disks(folders)}


class ReadingThread:
    """Reads when it is asked. It is started with the first question."""

    def __init__(self, read: Callable[[Pids], Values]) -> None:
        self._read = read
        self._questions: SimpleQueue[Pids | None] = SimpleQueue()
        self._answers: deque[Values] = deque()
        self._ended: threading.Event | None = None
        """Set when the thread has ended; None without one."""
        self.trouble = ""
        """The last error of a reading."""

    def ask(self, pids: Pids) -> None:
        """Read once; `answer` has it later."""
        if self._ended is None:
            if not start_thread(self._run):
                raise RuntimeError("no thread can be started")
            self._ended = threading.Event()
        self._questions.put(pids)

    def answer(self) -> Values | None:
        """What was read since the last call; None if that has not come yet."""
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        """End it, if it answers: a thread that is stuck ends with the process."""
        if self._ended is not None:
            self._questions.put(None)
            self._ended.wait(_END_S)
            self._ended = None

    def _run(self) -> None:
        while (pids := self._questions.get()) is not None:
            values: Values = {}
            try:
                values = self._read(pids)
            except Exception as error:
                self.trouble = f"the host's figures could not be read: {type(error).__name__}: {error}"
            self._answers.append(values)
        if self._ended is not None:
            self._ended.set()
