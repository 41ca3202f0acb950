"""Jobs that end badly, whose fault is known, under `gpuwatch launch`: `python tests/ends/ends.py [--seed S]`.

With --two-nodes each job has two nodes, in namespaces with a network of their own (tests/e2e/net/network.py): for root.

Prints a row for each job and a table: right (the rank at fault, and nobody else), less (unknown, or the rank beside
others), wrong (an innocent rank), over-sure (established, and not right).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

JOB = Path(__file__).parents[1] / "e2e" / "scripts" / "bad_ends.py"


PATIENCE_S = 120


class BadEnd(NamedTuple):
    """One way to end. `blames`: the guilty rank, or all; `kinds`: verdicts that are right."""

    how: str
    kinds: tuple[str, ...]
    blames: str = "guilty"


WAYS = [
    BadEnd("raises", ("crash",)),
    BadEnd("raises in the forward", ("crash",)),
    BadEnd("raises in a save", ("crash",)),
    BadEnd("raises before init", ("crash",)),
    BadEnd("all raise", ("crash",), "all"),
    BadEnd("unused", ("crash",), "all"),
    BadEnd("memory", ("crash",)),
    BadEnd("sys.exit", ("crash",)),
    BadEnd("os._exit", ("crash", "lost")),
    BadEnd("os._exit(0)", ("crash", "hang")),
    BadEnd("SIGKILL", ("lost",)),
    BadEnd("SIGSEGV", ("lost",)),
    BadEnd("SIGBUS", ("lost",)),
    BadEnd("SIGILL", ("lost",)),
    BadEnd("SIGABRT", ("lost",)),
    BadEnd("sleeps", ("hang",)),
    BadEnd("computes", ("hang",)),
    BadEnd("sleeps before init", ("hang", "crash", "lost")),
    BadEnd("abort, sleeps", ("hang",)),
    BadEnd("abort, computes", ("hang",)),
    BadEnd("stopped", ("hang",)),
    BadEnd("shorter loader", ("hang", "crash")),
    BadEnd("skips all_reduce", ("hang", "crash")),
    BadEnd("one barrier more", ("hang", "crash")),
    BadEnd("other size", ("hang", "crash")),
    BadEnd("other collective", ("hang", "crash")),
    BadEnd("groups in another order", ("hang", "crash")),
]


class EndedJob(NamedTuple):
    """What became of one."""

    way: BadEnd
    guilty: int
    nproc: int
    grade: str
    seconds: float
    said: str


def jobs(seed: int, number: int, sizes: tuple[int, ...] = (2, 3, 4)) -> list[tuple[BadEnd, int, int]]:
    """(way, guilty rank, number of ranks); each way once before any comes again."""
    rng = random.Random(seed)
    found = []
    while len(found) < number:
        for way in rng.sample(WAYS, len(WAYS)):
            nproc = rng.choice(sizes)
            found.append((way, rng.randrange(nproc), nproc))
    return found[:number]


def run(way: BadEnd, guilty: int, nproc: int, two_nodes: bool = False) -> EndedJob:
    """Run one, and grade what the report says."""
    with tempfile.TemporaryDirectory(prefix="gpuwatch-ends-") as folder, launches(two_nodes, nproc, folder) as commands:
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
            errors = list(pool.map(output_of, started))
        seconds = time.monotonic() - began
        reports = list(Path(folder).glob("gpuwatch-runs/*-*/report.json"))
        verdict = json.loads(reports[0].read_text())["verdict"] if reports else None
    if verdict is None:
        return EndedJob(way, guilty, nproc, "wrong", seconds, f"no report: {errors[0][-300:]}")
    return EndedJob(way, guilty, nproc, grade(way, guilty, nproc, verdict), seconds, text_of(verdict))


def output_of(launch: subprocess.Popen[str]) -> str:
    """What it has told. A job that torchrun does not end is ended as by `scancel`: it may wait for a node that left,
    or for a rank that is stopped."""
    try:
        return launch.communicate(timeout=PATIENCE_S)[1]
    except subprocess.TimeoutExpired:
        launch.send_signal(signal.SIGTERM)
        return launch.communicate(timeout=600)[1]


@contextmanager
def launches(two_nodes: bool, nproc: int, folder: str) -> Iterator[list[list[str]]]:
    """The command on each node; a script and its arguments follow it."""
    launch = [sys.executable, "-m", "gpuwatch.cli.main", "launch", "--preflight", "off"]
    if not two_nodes:
        yield [[*launch, "--nproc-per-node", str(nproc)]]
        return
    network = two_node_network(Path(folder))
    network.up()
    try:
        head = network.nodes[0].address
        meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:29400", "--rdzv-id", "ends"]
        each = [*launch, *meet, "--nproc-per-node", str(nproc // 2)]
        yield [node.inside(each) for node in network.nodes]
    finally:
        network.down()


def two_node_network(folder: Path) -> Any:
    """A Network of tests/e2e/net/network.py, which takes a name that no other has."""
    return _network().Network(f"ends-{os.getpid()}-{secrets.token_hex(2)}", 2, folder)


def why_no_two_nodes() -> str:
    """Why --two-nodes does not go here; "" if it does."""
    return str(_network().why_not())


def _network() -> Any:
    sys.path.insert(0, str(JOB.parents[1] / "net"))
    return importlib.import_module("network")


def grade(way: BadEnd, guilty: int, nproc: int, verdict: dict) -> str:
    """`right`, `less`, `wrong` or `over-sure`."""
    at_fault = set(range(nproc)) if way.blames == "all" else {guilty}
    named = {verdict["rank"]} - {None} | {one["rank"] for one in verdict["concurrent"]}
    if named and not named & at_fault:
        return "wrong"
    if named != at_fault:  # one of several that were at fault, and that torchrun stopped before they could say so
        is_over = verdict["certainty"] == "established" and not named < at_fault
        return "over-sure" if is_over else "less"
    if verdict["kind"] not in (*way.kinds, "interrupted"):
        return "wrong"
    return "right"


def text_of(verdict: dict) -> str:
    """`hang, supported: Rank 1 never reached ...`"""
    return f"{verdict['kind']}, {verdict['certainty']}: {verdict['statement']}"


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--two-nodes", action="store_true")
    given = parser.parse_args()
    chosen = jobs(given.seed, given.jobs, (2, 4) if given.two_nodes else (2, 3, 4))
    with ThreadPoolExecutor(given.at_once) as pool:
        ended = []
        for one in pool.map(lambda job: run(*job, given.two_nodes), chosen):
            ended.append(one)
            print(f"{one.grade:<9} {one.way.how} (rank {one.guilty} of {one.nproc}, {one.seconds:.0f} s): {one.said}")
            sys.stdout.flush()
    grades = Counter(one.grade for one in ended)
    print(", ".join(f"{grades[name]} {name}" for name in ("right", "less", "wrong", "over-sure")))
    return int(bool(grades["wrong"] or grades["over-sure"]))


if __name__ == "__main__":
    raise SystemExit(main())
