"""A rank that goes wrong in its preflight, for real, in the way that BAD_PROBE says. BAD_RANK says which: 1.

The others are left alone. The fault is put in where the process starts, and before torch is first used.
"""

import importlib.abc
import os
import signal
import sys
import time

WAY = os.environ.get("BAD_PROBE", "")
IS_BAD = os.environ.get("RANK", "none") in os.environ.get("BAD_RANK", "1").split(",")
IS_COORDINATOR = "gpuwatch.worker.preflight.coordinator" in sys.orig_argv
IS_TELLER = "--fallen" in sys.orig_argv
IS_WORKER = "-mgpuwatch.worker" in sys.orig_argv


def before_import_of(name, spoil):
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, found, path, target=None):
            if found == name:
                sys.meta_path.remove(self)
                spoil()
            return

    sys.meta_path.insert(0, Finder())


def spoil_all_gather():
    import torch.distributed as dist

    def broken(*_, **__):
        if WAY == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    dist.all_gather = broken


def spoil_forks():
    """The coordinator itself, when it is to begin its first test."""
    fork = os.fork

    def broken():
        if WAY == "coordinator dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif WAY == "coordinator hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif WAY == "worker dies":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)  # the kernel ends this process, too
        elif WAY == "no longer there":
            raise AttributeError("an error of the test itself")
        return fork()

    os.fork = broken


if IS_BAD and IS_WORKER and WAY.startswith("starts after "):
    time.sleep(float(WAY.split()[2]))
if IS_BAD and IS_COORDINATOR:
    if WAY in ("dies", "hangs"):
        before_import_of("gpuwatch.worker.preflight.course", spoil_all_gather)
    elif not IS_TELLER:
        spoil_forks()
    elif os.environ.get("BAD_TELLER"):
        os.kill(os.getpid(), signal.SIGKILL)
