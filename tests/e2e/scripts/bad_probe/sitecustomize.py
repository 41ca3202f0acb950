"""A rank whose probe goes wrong, for real, in the way that BAD_PROBE says; the others are left alone."""

import importlib.abc
import os
import signal
import sys
import time


def spoil():
    import torch
    import torch.distributed as dist

    way = os.environ["BAD_PROBE"]
    gather, reduce = dist.all_gather, dist.all_reduce
    if way == "dies":
        dist.all_gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif way == "hangs":
        dist.all_gather = lambda *_: time.sleep(1000)
    elif way == "lies":

        def lie(tensors, mine):
            mine += 1
            return gather(tensors, mine)

        dist.all_gather = lie
    elif way == "adds wrong":

        def add_wrong(total):
            reduce(total)
            total += 0.5

        dist.all_reduce = add_wrong
    elif way == "no memory":

        def none_left(*_, **__):
            raise torch.OutOfMemoryError("tried to allocate 64.00 MiB")

        torch.arange = none_left


if "gpuwatch.worker.probe" in sys.orig_argv and os.environ.get("RANK") == "1":

    class AfterTorch(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "gpuwatch.worker.identity":
                sys.meta_path.remove(self)
                spoil()
            return

    sys.meta_path.insert(0, AfterTorch())
