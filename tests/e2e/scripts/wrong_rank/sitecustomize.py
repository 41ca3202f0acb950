"""A rank 1 that answers, but wrongly, in the way that WRONG_RANK says; or whose memory is full."""

import importlib.abc
import os
import resource
import sys

WAY = os.environ.get("WRONG_RANK", "")


def spoil():
    import psutil
    import torch
    import torch.distributed as dist

    reduce, gather, broadcast, matmul = dist.all_reduce, dist.all_gather, dist.broadcast, torch.matmul

    def adds_wrong(total, **more):
        reduce(total, **more).wait()
        total[7] += 0.5

    def puts_in_wrong(total, **more):
        total[7] += 1
        return reduce(total, **more)

    def sends_wrong(gathered, mine, **more):
        mine[3] += 1
        return gather(gathered, mine, **more)

    def broadcasts_wrong(tensor, src, **more):
        if src == dist.get_rank():
            tensor[5] = -1
        return broadcast(tensor, src, **more)

    def another_matmul(first, second, out):
        matmul(first, second, out=out)
        out[0, 0] += 1

    def slow_matmul(first, second, out):
        for _ in range(20):
            matmul(first, second, out=out)

    if WAY in ("adds wrong", "puts in wrong"):
        dist.all_reduce = adds_wrong if WAY == "adds wrong" else puts_in_wrong
    elif WAY == "sends wrong":
        dist.all_gather = sends_wrong
    elif WAY == "broadcasts wrong":
        dist.broadcast = broadcasts_wrong
    elif WAY in ("another matmul", "slow matmul"):
        torch.matmul = another_matmul if WAY == "another matmul" else slow_matmul
    elif WAY == "full":  # as with `ulimit -v`: little more than it has already
        most = psutil.Process().memory_info().vms + (48 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "gpuwatch.worker.preflight.course":
            sys.meta_path.remove(self)
            spoil()
        return


if "gpuwatch.worker.preflight.coordinator" in sys.orig_argv and os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, AfterTorch())
