"""Starts the collector and the node agent as children of the launch: first line in is their settings, a closed pipe
tells them that the launch is gone, and Ctrl-C in the terminal does not reach them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import IO

import msgspec

from ..core.imports.own_imports import own_command
from ..core.wire.pipe import write_line

LIVED_S = 10.0
MOST_SHORT_LIVES = 10
_LONGEST_PAUSE_S = 5.0


class Lives:
    """Whether, and after what pause, a helper that has ended is started again: not if it ends at once each time."""

    def __init__(self) -> None:
        self.short = 0
        """How many in a row have ended within `LIVED_S`."""
        self._began = time.monotonic()

    def ended(self) -> float | None:
        """The one that ran has ended. Returns the pause in seconds; None if it is not to be started again."""
        self.short = self.short + 1 if time.monotonic() - self._began < LIVED_S else 1
        return min(0.05 * 2**self.short, _LONGEST_PAUSE_S) if self.short < MOST_SHORT_LIVES else None

    def began(self) -> None:
        """Another one is started."""
        self._began = time.monotonic()


class Child:
    """A helper process with JSON lines in and out. Raises OSError where no process can be started.

    One that cannot be told its settings is ended, and who reads its output sees that it has.
    """

    def __init__(self, module: str, config: msgspec.Struct, log: Path | None = None) -> None:
        with open(log or os.devnull, "ab") as errors:  # noqa: PTH123  # os.devnull is no Path
            self._process = subprocess.Popen(
                own_command(f"gpuwatch.{module}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                close_fds=True,
            )
        if not write_line(self.stdin, config):
            self._process.kill()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def ended_well(self) -> bool:
        """Whether it comes to an end by itself, now that its output is closed."""
        try:
            return self._process.wait(5.0) == 0
        except subprocess.TimeoutExpired:
            return False

    @property
    def stdin(self) -> IO[bytes]:
        """Where it reads."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Where it writes."""
        assert self._process.stdout is not None
        return self._process.stdout

    def end(self, timeout_s: float, *, kill: bool = True) -> int | None:
        """Close its input and wait for it to finish. After `timeout_s` it is killed, or left to itself.

        Returns its exit code, None if it had none of its own.
        """
        try:
            self.stdin.close()
        except OSError:
            pass
        if not timeout_s:
            return None
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if not kill:
                return None
            self._process.kill()
            self._process.wait()
            code = None
        self.stdout.close()
        return code

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
