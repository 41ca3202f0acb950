"""A rank of a job that ends badly: `bad_ends.py HOW GUILTY`. The HOWs, and whom each blames: tests/ends/ways.py.

One that "runs on" is ended from outside: tests/ends/on_slurm.py.
"""

import atexit
import ctypes
import itertools
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from standing_still import abort_when_still, fault_when_still
from torch import nn

HOW, GUILTY = sys.argv[1], int(sys.argv[2])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
AT = 3
"""The batch in which it happens."""
GROUP_S = 7.0
STILL_S = 4.0
MOST_MEMORY = 64
"""In parts of 64 MiB: more than the limit that ends.py sets."""


def at_fault():
    """The fault comes next: told to ends.py, by the clock of this host."""
    told = Path(f"fault-{RANK}.new")
    told.write_text(str(time.time()))
    told.rename(f"fault-{RANK}")


class Preempted(Exception):
    """What a handler raises."""


class Preemption:
    """SIGTERM comes from a process outside of the ranks; the script saves, and exits with 7, unless HOW says more."""

    def __init__(self):
        self.is_told = False
        if HOW.startswith("preempted") and "no handler" not in HOW:
            signal.signal(signal.SIGTERM, self.hear)

    def hear(self, number, frame):
        self.is_told = True
        if HOW.endswith("raises"):
            raise Preempted("the scheduler wants the node")
        if "handler" in HOW:
            self.leave()

    def begin(self, mine):
        """What a scheduler does: each launch, each rank, or both are sent the signal."""
        launch = os.getppid() if os.environ["LOCAL_RANK"] == "0" else None
        who = {
            "preempted: launch": [launch],
            "preempted: every process": [launch, os.getpid()],
            "preempted: ranks": [os.getpid()],
            "preempted: in a handler": [os.getpid()],
            "preempted: one rank": [os.getpid()] if mine else [],
            "preempted: no handler": [os.getpid()],
            "preempted: handler raises": [os.getpid()],
            "preempted: launch, handler raises": [launch],
        }[HOW]
        pids = [str(pid) for pid in who if pid is not None]
        if pids:
            at_fault()
            subprocess.run(["sh", "-c", f"kill -TERM {' '.join(pids)}"], check=True)

    def leave_if_told(self):
        """All ranks leave at the same batch, if they can still ask each other."""
        if HOW == "preempted: one rank":
            told = self.is_told
        else:
            flag = torch.tensor(float(self.is_told))
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            told = bool(flag)
        if told:
            self.leave()

    def leave(self):
        with tempfile.TemporaryFile() as file:
            torch.save(torch.ones(1 << 20), file)
            os.fsync(file.fileno())
        sys.exit(7)


def elsewhere():
    time.sleep(3600)


def compute():
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)


def take_down_slowly():
    """Until the launch ends it, as the others have lost their peer."""
    dist.destroy_process_group()
    threading.Event().wait()


def take_memory():
    held = []
    while len(held) < MOST_MEMORY:
        held.append(torch.ones(16 << 20))
    raise RuntimeError("the memory of this job has no limit")


def fatal(name):
    if name == "SIGBUS":
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)
            memory[0] = 1
    elif name == "SIGSEGV":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), getattr(signal, name))


def misbehave(mine):
    """What only the guilty rank does, before the batch."""
    if mine or HOW == "all raise":
        at_fault()
    if HOW.startswith("SIG") and mine:
        fatal(HOW)
    if HOW == "raises" and mine:
        raise ValueError("no such shard")
    if HOW == "all raise":
        raise ValueError(f"empty shard {RANK}")
    if HOW == "memory" and mine:
        raise MemoryError
    if HOW == "out of memory" and mine:
        take_memory()
    if HOW == "sys.exit" and mine:
        sys.exit(3)
    if HOW == "raises, slow teardown" and mine:
        try:
            raise ValueError("no such shard")
        finally:
            take_down_slowly()
    if HOW == "sys.exit, slow teardown" and mine:
        atexit.register(take_down_slowly)
        sys.exit(3)
    if HOW == "os._exit" and mine:
        os._exit(1)
    if HOW == "os._exit(0)" and mine:
        os._exit(0)
    if HOW in ("sleeps", "abort, sleeps", "fault, sleeps") and mine:
        elsewhere()
    if HOW in ("computes", "abort, computes") and mine:
        compute()
    if HOW.startswith("abort") and not mine:
        threading.Thread(target=abort_when_still, args=(threading.get_ident(), STILL_S), daemon=True).start()
    if HOW.startswith("fault") and not mine:
        threading.Thread(target=fault_when_still, args=(threading.get_ident(), STILL_S), daemon=True).start()
        dist.barrier()
    if HOW == "stopped" and mine:
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "skips all_reduce" and not mine:
        dist.all_reduce(torch.ones(3))
    if HOW == "one barrier more" and mine:
        dist.barrier()
    if HOW == "other size":
        dist.all_reduce(torch.ones(5 if mine else 3))
    if HOW == "other collective":
        dist.broadcast(torch.ones(3), 0) if mine else dist.all_reduce(torch.ones(3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if HOW == "raises in the forward" and RANK == GUILTY and x.mean() > 2:
            at_fault()
            raise RuntimeError("shape mismatch")
        return self.body(x) if HOW == "unused" else self.unused(self.body(x))


def save(batch):
    if HOW == "raises in a save" and RANK == GUILTY and batch == AT:
        at_fault()
        raise OSError(28, "No space left on device")
    dist.barrier()


def main():
    if HOW.endswith("before init") and RANK == GUILTY:
        at_fault()
    if HOW == "raises before init" and RANK == GUILTY:
        raise ImportError("no module named flash")
    if HOW == "sleeps before init" and RANK == GUILTY:
        elsewhere()
    seconds = 600 if HOW.startswith(("abort", "fault")) else GROUP_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    mine = RANK == GUILTY
    groups = [dist.new_group(timeout=timedelta(seconds=seconds)) for _ in range(2)]
    preemption = Preemption()
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batches = AT if HOW == "shorter loader" and mine else 200 if HOW.startswith("preempted") else 8
    for batch in itertools.count() if HOW == "runs on" else range(batches):
        if HOW == "runs on":
            time.sleep(0.01)
        if batch == AT and HOW == "runs on":
            Path(f"under-way-{RANK}").write_text(os.uname().nodename)
        elif batch == AT:
            preemption.begin(mine) if HOW.startswith("preempted") else misbehave(mine)
        if HOW.startswith("preempted"):
            preemption.leave_if_told()
        if HOW == "groups in another order" and batch == AT:
            for group in reversed(groups) if mine else groups:
                dist.all_reduce(torch.ones(2), group=group)
        loss = model(torch.full((2, 8), float(batch % 8))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        save(batch)
    if HOW == "shorter loader" and mine:
        at_fault()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
