"""A process that has imported torch once, and forks a command for each request: importing torch takes longer than all
the rest of many a test.

A request is one JSON object a line: argv, env (all of it), log (the file of its output), and where it matters cwd,
umask, closed (descriptors), limits (name -> number), shim (a library of tests/sweep, which counts from then on). The
command is `gpuwatch`, `torchrun`, or `-c` with code. The answer is `pid N`, and when that has ended `end N CODE`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, NoReturn

LAUNCH = ("torch.distributed.run", "gpuwatch.cli.main", "gpuwatch.cli.jobs", "gpuwatch.launcher.launch_job")
"""What a launch imports."""
READY_S = 240.0
_LAUNCHER = 4
"""The number of the role in sweep/fail_nth.c."""


class Forks:
    """Starts commands in forks of one process, several at once."""

    def __init__(self, *imported: str, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *imported], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._text = ""
        self._said: deque[str] = deque()
        self._codes: dict[int, int] = {}
        assert self._word(READY_S) == ["ready"]

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(self, argv: list[str], **request: Any) -> int:
        """Returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"argv": argv, **request}).encode() + b"\n")
        self._process.stdin.flush()
        while (words := self._word(READY_S)) and words[0] == "end":
            self._codes[int(words[1])] = int(words[2])
        assert words is not None
        pid = int(words[1])
        self._codes.pop(pid, None)  # of an earlier one with this number
        return pid

    def code(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """The exit code of such a process; None if it has not ended within so long."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._codes and (words := self._word(max(0.0, deadline - time.monotonic()))):
            self._codes[int(words[1])] = int(words[2])
        return self._codes.get(pid)

    def _word(self, timeout_s: float) -> list[str] | None:
        """The next line; None if there is none for so long."""
        out = self._process.stdout
        assert out is not None
        deadline = time.monotonic() + timeout_s
        while not self._said:
            if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(out.fileno(), 4096)
            assert data, "the process that forks has ended"
            *lines, self._text = (self._text + data.decode()).split("\n")
            self._said += lines
        return self._said.popleft().split()


def become(job: dict[str, Any]) -> NoReturn:
    """The command, in its surroundings."""
    os.setsid()
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job.get("cwd", "."))
    if "umask" in job:
        os.umask(job["umask"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.closerange(3, 4096)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    for number in job.get("closed", ()):
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    for name, most in job.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (most, most))
    if "shim" in job:
        ctypes.CDLL(job["shim"]).sweep_begin(_LAUNCHER)
    code = 1
    try:
        _run(job["argv"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _run(argv: list[str]) -> None:
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = argv
        importlib.import_module("gpuwatch.cli.main" if argv[0] == "gpuwatch" else "torch.distributed.run").main()


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    print("ready", flush=True)
    running: set[int] = set()
    buffer = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            pid = os.fork()
            if pid == 0:
                become(json.loads(line))
            running.add(pid)
            print("pid", pid, flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                print("end", pid, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
