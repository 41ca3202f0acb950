"""`--capture`: writes the forward of an alarm to overflow.pt, and beside it reproduce.py, which runs it again.

The job ends anyway. A thread writes, and the job waits for it no longer than a deadline. The file gets its name when
all of it is written.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.events.alarm_evidence import CaptureFile
from ...core.guest.own_files import standard_streams_taken, write_whole
from ...core.guest.threads import AwaitedThread
from ...core.signal_errors import from_outside, suppress_own
from ...core.text import size_text
from ..record.names import inputs_of
from ..record.plain_tensor import version_of
from . import reproduce
from .captured_parts import BoundedFile, CapturedParts, CaptureRefused
from .forward_thread import ContextMaker, RandomNumbers

_MOST_NAMES = 100
_LOCK_S = 1.0
_SHARE = 0.8
"""The share of the time limit for writing. In the rest torch's writer ends, which checksums what is dropped."""


class ForwardCapture:
    """The one file of a rank. `result` is there after the first attempt."""

    def __init__(self, folder: str, most: int, rank: int, *, is_tested: bool) -> None:
        """`is_tested`: a second run has shown that the call leaves its inputs as they are."""
        self._folder, self._most, self._rank, self._is_tested = Path(folder), most, rank, is_tested
        self.result: CaptureFile | None = None
        self._lock = threading.Lock()
        """The thread gives the file its name, or the deadline passes: not both."""
        self._stop = threading.Event()
        """The deadline passes. The thread leaves torch's writer soon: it ends a process whose Python ends first."""
        self._new = self._folder / f".overflow-{rank}-{os.getpid()}"

    def write(
        self,
        module: nn.Module,
        name: str,
        inputs: tuple[Any, Any],
        contexts: list[ContextMaker],
        random: RandomNumbers | None,
        limit_s: float,
    ) -> float:
        """Write it once, and wait at most this long. Returns the seconds that it took. Never raises."""
        if self.result is not None:
            return 0.0
        began = time.monotonic()
        call = {
            "args": inputs[0],
            "kwargs": inputs[1],
            "name": name,
            "rank": self._rank,
            "grad": torch.is_grad_enabled(),
            "rng": {"cpu": random.cpu, reproduce.OF_GPU: random.gpu} if random is not None else None,
            "autocast": dict(
                part.args for part in contexts if isinstance(part, partial) and part.func is torch.autocast
            ),
            "default_dtype": torch.get_default_dtype(),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
        thread = AwaitedThread(partial(self._write, module, call), "gpuwatch capture")
        try:
            thread.begin()
            thread.ends_within(limit_s * _SHARE)
        finally:  # also where a signal's handler has raised
            self._stop.set()
            thread.ends_within(limit_s * (1 - _SHARE))
        if thread.refused is not None:
            self.result = CaptureFile(refused=f"a thread to write it could not be started: {thread.refused}")
        is_free = self._lock.acquire(timeout=_LOCK_S)  # else the disk hangs as the file gets its name
        self.result = self.result or CaptureFile(refused=f"writing it took longer than {limit_s * _SHARE:.3g} s")
        if is_free:
            self._lock.release()
        return time.monotonic() - began

    def _write(self, module: nn.Module, call: dict[str, Any]) -> None:
        try:
            with torch.no_grad(), standard_streams_taken():
                self._write_file(module, call)
            return
        except CaptureRefused as error:
            why = str(error)
        except OSError as error:
            if from_outside(error):
                raise
            why = f"{self._folder} could not be written: {error.strerror or error}"
        except BaseException as error:  # the script's own code may run where an object is pickled
            why = f"writing it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        with self._lock:
            self.result = self.result or CaptureFile(refused=why)

    def _write_file(self, module: nn.Module, call: dict[str, Any]) -> None:
        parts = CapturedParts(self._most)
        capture = parts.of(module, call)
        leaves = [leaf for _, leaf in inputs_of(call["args"], call["kwargs"]) if isinstance(leaf, torch.Tensor)]
        if not self._is_tested and any(map(version_of, leaves)):
            parts.notes.append("its inputs may have been changed in place by the call: --explain off tests nothing")
        limit = f"--capture-max is {size_text(self._most)}"
        if parts.bytes > self._most:
            raise CaptureRefused(f"it takes {size_text(parts.bytes)}, and {limit}; --sync writes a smaller part")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.geteuid():
            raise CaptureRefused(f"{self._folder} belongs to another user")
        self._new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(self._new, flags, 0o600), "wb") as file:
                # torch's format aligns each tensor
                bounded = BoundedFile(file, self._most + (self._most >> 3) + (1 << 20), self._stop)
                torch.save(capture, bounded)  # type: ignore[arg-type]  # it needs no more than write
                if bounded.error is not None:
                    raise bounded.error
                file.flush()
                size = os.fstat(file.fileno()).st_size
            module_text = f"{call['name'] or '(root)'} ({capture['class']})"
            trust = bool(reproduce.needs_trust(capture))
            self._name(CaptureFile("", size, module_text, trust, parts.notes))
        finally:
            self._new.unlink(missing_ok=True)

    def _name(self, file: CaptureFile) -> None:
        """Name it overflow.pt, or by this rank where another one, or an earlier attempt, has that."""
        tails = ["", f"-rank{self._rank}", *(f"-rank{self._rank}-{number}" for number in range(2, _MOST_NAMES))]
        for tail in tails:
            path = self._folder / f"overflow{tail}.pt"
            with self._lock, suppress(FileExistsError):
                if self._stop.is_set():
                    return
                path.hardlink_to(self._new)
                with suppress_own(OSError):  # `gpuwatch replay` does without
                    write_whole(self._folder / f"reproduce{tail}.py", Path(reproduce.__file__).read_bytes())
                self.result = CaptureFile(str(path), file.bytes, file.module, file.needs_trust, file.notes)
                return
        raise CaptureRefused(f"{self._folder} has {_MOST_NAMES} of them")
