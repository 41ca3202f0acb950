"""Runs ranks as forked processes of one that has imported torch once, as the coordinator does.

Each line on stdin is a request, `{"call": "group", "ranks": [0, 1, 2], "faults": {"1": "adds wrong"}, ...}`; each line
on stdout its answer, what came of every rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta

import msgspec
import psutil
import torch
import torch.distributed as dist
from gpuwatch.core.identity import RankIdentity
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.preflight import steps
from gpuwatch.worker.preflight.bandwidth import measure
from gpuwatch.worker.preflight.course import PreflightRun
from gpuwatch.worker.preflight.device_tests import allocate, compute
from gpuwatch.worker.preflight.group_collectives import check_group, join
from gpuwatch.worker.preflight.meeting import StoreRendezvous, connect
from gpuwatch.worker.preflight.parts import RankTests
from gpuwatch.worker.preflight.probe_child import RankChild
from gpuwatch.worker.preflight.steps import PreflightEnd, StageDeadlines

CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")


def ended(work):
    if work is not None:
        work.wait()


class Endless:
    """A Work of NCCL whose peer is gone: it can be given up at a timeout."""

    def wait(self, timeout=timedelta(days=1)):
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for")


def spoil(way: str, store: dist.Store | None) -> None:
    """Make this rank wrong, in the collectives themselves, as a bad device or network would be."""
    reduce, gather, broadcast, matmul = dist.all_reduce, dist.all_gather, dist.broadcast, torch.matmul
    calls = []

    def adds_wrong(total, **more):
        ended(reduce(total, **more))
        total[7] += 0.5

    def puts_in_wrong(total, **more):
        total[7] += 1
        return reduce(total, **more)

    def puts_in_wrong_in_large_messages(total, **more):
        total[7] += total.numel() > 1 << 16
        return reduce(total, **more)

    def adds_wrong_in_large_groups(total, group=None, **more):
        if group is None:
            total[7] += 1
        return reduce(total, group=group, **more)

    def sends_wrong(gathered, mine, **more):
        mine[3] += 1
        return gather(gathered, mine, **more)

    def gets_wrong(gathered, mine, **more):
        ended(gather(gathered, mine, **more))
        for got in gathered:
            got[3] = 0

    def gets_first_wrong(gathered, mine, **more):
        ended(gather(gathered, mine, **more))
        gathered[0][3] = 0

    def broadcasts_wrong(tensor, src, **more):
        if src == dist.get_rank():
            tensor[5] = -1
        return broadcast(tensor, src, **more)

    def comes_late_from_the_broadcast(tensor, src, **more):
        ended(broadcast(tensor, src, **more))
        if src == dist.get_world_size() - 1:
            store.wait(["votes/0"])  # rank 0 votes when it is through the barrier

    def like_nccl(total, async_op=False, **more):
        """What it started never ends, and without a Work nobody can tell; whoever reads the result waits for it."""
        if not async_op:
            time.sleep(1000)
        return Endless()

    def hangs_in_init(*_, **__):
        time.sleep(1000)

    def with_one_thread(first, second, out):
        assert torch.get_num_threads() == 1
        matmul(first, second, out=out)

    def another_matmul(first, second, out):
        matmul(first, second, out=out)
        out[0, 0] += 1

    def now_and_then(first, second, out):
        calls.append(0)
        matmul(first, second, out=out)
        out[1, 1] += len(calls) == 2  # a slow CPU repeats it only once

    def is_slow(first, second, out):
        time.sleep(1)  # hundreds of products, so that no other work on the machine makes another rank as slow
        matmul(first, second, out=out)

    def full():
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), used + (32 << 20)))

    if way == "adds wrong":
        dist.all_reduce = adds_wrong
    elif way == "puts in wrong":
        dist.all_reduce = puts_in_wrong
    elif way == "puts in wrong in large messages":
        dist.all_reduce = puts_in_wrong_in_large_messages
    elif way == "adds wrong in large groups":
        dist.all_reduce = adds_wrong_in_large_groups
    elif way == "sends wrong":
        dist.all_gather = sends_wrong
    elif way == "gets wrong":
        dist.all_gather = gets_wrong
    elif way == "gets first wrong":
        dist.all_gather = gets_first_wrong
    elif way == "broadcasts wrong":
        dist.broadcast = broadcasts_wrong
    elif way == "does nothing":
        dist.all_reduce = dist.all_gather = dist.broadcast = dist.barrier = lambda *_, **__: None
    elif way == "dies":
        dist.all_gather = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    elif way == "hangs":
        dist.all_gather = lambda *_, **__: time.sleep(1000)
    elif way == "like NCCL":
        dist.all_reduce = like_nccl
    elif way == "hangs in init":
        dist.init_process_group = hangs_in_init
    elif way == "another matmul":
        torch.matmul = another_matmul
    elif way == "now and then":
        torch.matmul = now_and_then
    elif way == "slow":
        torch.matmul = is_slow
    elif way == "four threads":
        torch.set_num_threads(4)
        torch.matmul = with_one_thread
    elif way == "skips barrier":
        dist.barrier = lambda **_: None
    elif way == "comes late to the barrier":
        dist.barrier = lambda **_: None
        dist.broadcast = comes_late_from_the_broadcast
    elif way == "full":
        full()
    else:
        raise AssertionError(way)


def run_rank(request, rank, port, said):
    if request["call"] in ("quick", "one fails", "course"):
        me = RankIdentity(rank, rank, len(request["ranks"]), len(request["ranks"]), "127.0.0.1", port, True)
        if request["call"] == "course":
            return course(request, me)
        parts = RankTests(me, WorkerSettings("", alloc="1MiB"), StageDeadlines(request["timeout_s"]), "test", "")
        return (quick if request["call"] == "quick" else beside_rank_2)(request, me, parts)

    def call(say):
        way = request.get("faults", {}).get(str(rank))
        if request["call"] in ("compute", "allocate"):
            if way:
                spoil(way, None)
            return compute(CPU) if request["call"] == "compute" else allocate(CPU, None, quick=request["quick"])
        client = dist.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        store = dist.PrefixStore("test", client)
        if way == "never comes":
            time.sleep(1000)
        if way:
            spoil(way, store)
        test = {"group": check_group, "bandwidth": measure}[request["call"]]
        group = join(store, CPU, "gloo", request["ranks"], rank, request["timeout_s"], say)
        return test(group, *request.get("more", []))

    child = RankChild(lambda _, say: call(say))
    ending = child.run(b"", request.get("deadline_s", 60.0), said.append)
    child.close()
    failure = ending.failure
    return {
        "kind": ending.kind,
        "detail": ending.detail,
        "peers": failure.peers if failure else None,
        "known": failure is not None,
        "next": failure.next if failure else "",
        "value": msgspec.to_builtins(ending.value),
        "said": said,
    }


def quick(request, me, parts):
    """The stages of a quick preflight, in the rank's own process and child; how many processes that takes."""
    fork, forks = os.fork, []

    def counted():
        forks.append(0)
        return fork()

    os.fork = counted
    reports = [
        parts.inventory(),
        parts.allocation([""] * len(request["ranks"])),
        parts.in_group("node group", request["ranks"], "gloo", lambda step: None),
    ]
    parts.child.close()
    left = len(psutil.Process().children())
    return {"value": {"kinds": [one.kind for one in reports], "forks": len(forks), "left": left}}


def beside_rank_2(request, me, parts):
    """Rank 2 fails before it reaches the group, and reports that; what the others report. None of theirs ends."""
    if me.rank == 2:
        times = {"reports_s": 0.0, "conclusion_s": 0.0, "deputy_s": 0.0}
        meeting = StoreRendezvous(connect(me, 20.0), "test", me.rank, me.world_size)
        return {"value": meeting.meet("ranks 1", b"", lambda found: b"drawn", **times, failed=True).decode()}
    spoil("like NCCL", None)
    report = parts.in_group("ranks 1", request["group"], "gloo", lambda step: None)
    return {"value": msgspec.to_builtins(report)}


def course(request, me):
    """All of a quick preflight: how it ended, and the seconds since the first group, whose deadline is `timeout_s`."""
    os.environ.update(request["environment"], RANK=str(me.rank))
    steps._TABLE_S.update(dict.fromkeys(steps._TABLE_S, 600.0) | {"node group": request["timeout_s"]})
    lines = []
    settings = WorkerSettings("", alloc="1MiB", preflight_timeout_s=600.0)
    run = PreflightRun(me, settings, lambda line: lines.append((time.monotonic(), line)), time.monotonic())
    run.run()
    (end,) = (line for _, line in lines if isinstance(line, PreflightEnd))
    began_s = next((at_s for at_s, line in lines if getattr(line, "step", "") == "node group"), None)
    assert began_s is not None, end
    return {"end": msgspec.json.encode(end).decode(), "seconds": lines[-1][0] - began_s}


def host_store(tell):
    """A process of its own: the store has a thread, and a fork beside a thread may take over a lock that is held."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tell.send(store.port)
    signal.pause()


def answer(request):
    hear, tell = FORK.Pipe(duplex=False)
    host = FORK.Process(target=host_store, args=(tell,))
    host.start()
    try:
        port = hear.recv()
        ranks = {}
        for rank in request["ranks"]:
            hear, tell = FORK.Pipe(duplex=False)
            process = FORK.Process(
                target=lambda rank, tell: tell.send(run_rank(request, rank, port, [])), args=(rank, tell)
            )
            process.start()
            tell.close()
            ranks[rank] = (process, hear)
        outcomes = {rank: hear.recv() for rank, (_, hear) in ranks.items()}
        for process, _ in ranks.values():
            process.join()
        return outcomes
    finally:
        host.kill()
        host.join()


if __name__ == "__main__":
    for line in sys.stdin:
        assert threading.active_count() == 1
        print(json.dumps(answer(json.loads(line))), flush=True)
