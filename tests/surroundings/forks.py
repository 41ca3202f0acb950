"""A process that has imported torch once, and forks a launch or a torchrun for each line on stdin.

One JSON object a line: argv, cwd, env (all of it), umask, closed, limits (name -> number), log. It answers `pid N`, and
when that has ended `end N CODE`. Importing torch takes longer than all the rest of a launch of light ranks.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import resource
import select
import sys
import threading
from typing import Any, NoReturn

IMPORTED = ("torch.distributed.run", "gpuwatch.cli.main", "gpuwatch.cli.jobs", "gpuwatch.launcher.launch_job")


def become(job: dict[str, Any]) -> NoReturn:
    """The command, in its surroundings."""
    os.setsid()
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    os.umask(job["umask"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.closerange(3, 4096)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    for number in job["closed"]:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    for name, most in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    sys.argv = job["argv"]
    code = 1
    try:
        module = "gpuwatch.cli.main" if sys.argv[0] == "gpuwatch" else "torch.distributed.run"
        importlib.import_module(module).main()
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


def main() -> None:
    for name in IMPORTED:
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


main()
