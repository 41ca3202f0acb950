"""A process that has imported torch and the launch once, and forks a launch for each line on stdin.

One JSON object a line: argv, cwd, env, log. It answers with the launch's pid, and when that has ended with its code.
Importing torch takes longer than all the rest of a launch of light ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import sys
import threading
from typing import NoReturn

LAUNCHER = 4
"""The number of the role in fail_nth.c."""
IMPORTED = ("torch.distributed.run", "gpuwatch.cli.main", "gpuwatch.cli.jobs", "gpuwatch.launcher.launch_job")


def launch(job: dict, shim: str) -> NoReturn:
    """Become the launch."""
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    sys.stdin = open(0)  # noqa: SIM115  # the one before is the driver's pipe
    sys.argv = ["gpuwatch", *job["argv"]]
    ctypes.CDLL(shim).sweep_begin(LAUNCHER)
    code = 1
    try:
        importlib.import_module("gpuwatch.cli.main").main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    shim = os.environ["LD_PRELOAD"]
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            launch(job, shim)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


main()
