"""Jobs that end badly, whose fault is known, under `gpuwatch launch`: `python tests/ends/ends.py [--seed S]`.

With --two-nodes each job has two nodes, in namespaces with a network of their own (tests/e2e/net/network.py): for root.
With --slurm it runs on a real SLURM of two nodes (tests/slurm/cluster.py), one at a time: also for root.
A job that runs out of memory has a memory cgroup with a limit, on each of its nodes: for root, too.

Prints a row for each job and a table: right (the rank at fault, and nobody else), less (unknown, or the rank beside
others), wrong (an innocent rank), over-sure (established, and not right). Of the jobs that were right it prints how
long after the fault the terminal first named the rank (named_after.py), by kind of verdict.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __package__:
    from .named_after import TimedLine, fault_s, named_after_s
    from .ways import (
        OUT_OF_MEMORY,
        SLURM_WAYS,
        WAYS,
        BadEnd,
        EndedJob,
        grade,
        jobs,
        ranks_at_fault,
        text_of,
        times_to_name,
    )
else:
    from named_after import TimedLine, fault_s, named_after_s
    from ways import (
        OUT_OF_MEMORY,
        SLURM_WAYS,
        WAYS,
        BadEnd,
        EndedJob,
        grade,
        jobs,
        ranks_at_fault,
        text_of,
        times_to_name,
    )

JOB = Path(__file__).parents[1] / "e2e" / "scripts" / "bad_ends.py"
PATIENCE_S = 120
_LAUNCH_MEMORY, _RANK_MEMORY = 800 << 20, 400 << 20
"""Bytes of a job that runs out of memory: for what starts its ranks, and for each of them."""


def run(way: BadEnd, guilty: int, nproc: int, two_nodes: bool = False) -> EndedJob:
    """Run one, and grade what the report says."""
    with (
        tempfile.TemporaryDirectory(prefix="gpuwatch-ends-") as folder,
        launches(two_nodes, nproc, folder, is_limited=way.how == OUT_OF_MEMORY) as commands,
    ):
        began = time.monotonic()
        started = [
            subprocess.Popen(
                [*command, str(JOB), way.how, str(guilty)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]
        with ThreadPoolExecutor(len(started)) as pool:
            outputs = list(pool.map(output_of, started))
        seconds = time.monotonic() - began
        reports = list(Path(folder).glob("gpuwatch-runs/*-*/report.json"))
        verdict = json.loads(reports[0].read_text())["verdict"] if reports else None
        began_s = fault_s(Path(folder))
    if verdict is None:
        said = "".join(text for _, text in outputs[0])
        return EndedJob(way, guilty, nproc, "wrong", seconds, f"no report: {said[-300:]}")
    graded = grade(way, guilty, nproc, verdict)
    to_name_s = None
    if began_s is not None:
        named = [named_after_s(lines, began_s, ranks_at_fault(way, guilty, nproc)) for lines in outputs]
        to_name_s = min((after for after in named if after is not None), default=None)
    return EndedJob(way, guilty, nproc, graded, seconds, text_of(verdict), verdict["kind"], to_name_s)


def output_of(launch: subprocess.Popen[str]) -> list[TimedLine]:
    """What it has told, and when. A job that torchrun does not end is ended as by `scancel`: it may wait for a node
    that left, or for a rank that is stopped."""
    stderr = launch.stderr
    assert stderr is not None
    lines: list[TimedLine] = []
    reader = threading.Thread(target=lambda: lines.extend((time.time(), line) for line in stderr))
    reader.start()
    try:
        launch.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        launch.send_signal(signal.SIGTERM)
        launch.wait(timeout=600)
    reader.join()
    stderr.close()
    return lines


@contextmanager
def launches(two_nodes: bool, nproc: int, folder: str, is_limited: bool) -> Iterator[list[list[str]]]:
    """The command on each node; a script and its arguments follow it. `is_limited`: each has only so much memory."""
    launch = [sys.executable, "-m", "gpuwatch.cli.main", "launch", "--preflight", "off"]
    of_node = nproc // 2 if two_nodes else nproc
    each = [*launch, "--nproc-per-node", str(of_node)]
    with ExitStack() as held:
        limits = []
        for _ in range(1 + two_nodes) if is_limited else ():
            limits.append(held.enter_context(_cgroups().job_cgroup(_LAUNCH_MEMORY + of_node * _RANK_MEMORY)))
        if not two_nodes:
            yield [limits[0].inside(*each) if limits else each]
            return
        network = two_node_network(Path(folder))
        held.callback(network.down)
        network.up()
        head = network.nodes[0].address
        each += ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:29400", "--rdzv-id", "ends"]
        if limits:
            yield [
                limit.inside(*node.inside(limit.shown(*each)))
                for limit, node in zip(limits, network.nodes, strict=True)
            ]
        else:
            yield [node.inside(each) for node in network.nodes]


def two_node_network(folder: Path) -> Any:
    """A Network of tests/e2e/net/network.py, which takes a name that no other has."""
    return _network().Network(f"ends-{os.getpid()}-{secrets.token_hex(2)}", 2, folder)


def why_no_two_nodes() -> str:
    """Why --two-nodes does not go here; "" if it does."""
    return str(_network().why_not())


def why_no_cgroup() -> str:
    """Why no job can run out of memory here; "" if one can."""
    return str(_cgroups().why_no_cgroup())


def _cgroups() -> Any:
    sys.path.insert(0, str(JOB.parents[2]))
    return importlib.import_module("memory_cgroups")


def _network() -> Any:
    sys.path.insert(0, str(JOB.parents[1] / "net"))
    return importlib.import_module("network")


@contextmanager
def runner(two_nodes: bool, slurm: bool) -> Iterator[Callable[[BadEnd, int, int], EndedJob]]:
    """What runs a job, where it is to run."""
    if not slurm:
        yield lambda way, guilty, nproc: run(way, guilty, nproc, two_nodes)
        return
    on_slurm = importlib.import_module(f"{__package__}.on_slurm" if __package__ else "on_slurm")
    if reason := on_slurm.why_not():
        raise SystemExit(f"no SLURM here: {reason}")
    with on_slurm.cluster() as cluster:
        yield lambda way, guilty, nproc: on_slurm.run(cluster, way, guilty, nproc)


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--only", default="", metavar="WORD", help="the ways whose names have it")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--two-nodes", action="store_true")
    parser.add_argument("--slurm", action="store_true")
    given = parser.parse_args()
    sizes = (2, 4) if given.two_nodes or given.slurm else (2, 3, 4)
    ways = [way for way in (SLURM_WAYS if given.slurm else WAYS) if given.only in way.how]
    if any(way.how == OUT_OF_MEMORY for way in ways) and (reason := why_no_cgroup()):
        print(f"without jobs that run out of memory: {reason}")
        ways = [way for way in ways if way.how != OUT_OF_MEMORY]
    if not ways:
        parser.error(f"--only: expected a word of the name of a way that can be had, found {given.only}")
    chosen = jobs(given.seed, given.jobs, sizes, ways)
    at_once = 1 if given.slurm else given.at_once
    with runner(given.two_nodes, given.slurm) as run_one, ThreadPoolExecutor(at_once) as pool:
        ended = []
        for one in pool.map(lambda job: run_one(*job), chosen):
            ended.append(one)
            named = f", named after {one.to_name_s:.1f} s" if one.to_name_s is not None else ""
            job = f"rank {one.guilty} of {one.nproc}, {one.seconds:.0f} s{named}"
            print(f"{one.grade:<9} {one.way.how} ({job}): {one.said}")
            sys.stdout.flush()
    grades = Counter(one.grade for one in ended)
    print(", ".join(f"{grades[name]} {name}" for name in ("right", "less", "wrong", "over-sure")))
    print(*times_to_name(ended), sep="\n")
    return int(bool(grades["wrong"] or grades["over-sure"]))


if __name__ == "__main__":
    raise SystemExit(main())
