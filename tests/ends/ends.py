"""Jobs that end badly, whose fault is known, under `gpuwatch launch`: `python tests/ends/ends.py [--seed S]`.

With --two-nodes each job has two nodes, in namespaces with a network of their own (tests/e2e/net/network.py): for root.

Prints a row for each job and a table: right (the rank at fault, and nobody else), less (unknown, or the rank beside
others), wrong (an innocent rank), over-sure (established, and not right). Of the jobs that were right it prints how
long after the fault the terminal first named the rank (named_after.py), by kind of verdict.
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
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__:
    from .named_after import TimedLine, fault_s, named_after_s
else:
    from named_after import TimedLine, fault_s, named_after_s

JOB = Path(__file__).parents[1] / "e2e" / "scripts" / "bad_ends.py"


PATIENCE_S = 120


class BadEnd(NamedTuple):
    """One way to end. `blames`: the guilty rank, all, or nobody; `kinds`: verdicts that are right."""

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
    BadEnd("SIGTERM", ("lost",)),
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
    BadEnd("preempted: launch", ("interrupted",), "nobody"),
    BadEnd("preempted: every process", ("interrupted",), "nobody"),
    BadEnd("preempted: ranks", ("interrupted",), "nobody"),
    BadEnd("preempted: in a handler", ("interrupted",), "nobody"),
    BadEnd("preempted: one rank", ("interrupted",)),
    BadEnd("preempted: no handler", ("interrupted",), "nobody"),
    BadEnd("preempted: handler raises", ("interrupted",), "nobody"),
    BadEnd("preempted: launch, handler raises", ("interrupted",), "nobody"),
]


class EndedJob(NamedTuple):
    """What became of one."""

    way: BadEnd
    guilty: int
    nproc: int
    grade: str
    seconds: float
    said: str
    kind: str = ""
    """The verdict's."""
    to_name_s: float | None = None
    """From the fault to the first line on the terminal that names who is at fault."""


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
    at_fault = ranks_at_fault(way, guilty, nproc)
    named = {verdict["rank"]} - {None} | {one["rank"] for one in verdict["concurrent"]}
    if named and not named & at_fault:
        return "wrong"
    if named != at_fault:  # one of several that were at fault, and that torchrun stopped before they could say so
        is_over = verdict["certainty"] == "established" and not named < at_fault
        return "over-sure" if is_over else "less"
    if verdict["kind"] not in (*way.kinds, "interrupted"):
        return "less" if verdict["kind"] == "unknown" else "wrong"
    return "right"


def ranks_at_fault(way: BadEnd, guilty: int, nproc: int) -> set[int]:
    """Whom a right verdict names."""
    return {"all": set(range(nproc)), "nobody": set(), "guilty": {guilty}}[way.blames]


def text_of(verdict: dict) -> str:
    """`hang, supported: Rank 1 is at train.py:7 ...`"""
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
            named = f", named after {one.to_name_s:.1f} s" if one.to_name_s is not None else ""
            job = f"rank {one.guilty} of {one.nproc}, {one.seconds:.0f} s{named}"
            print(f"{one.grade:<9} {one.way.how} ({job}): {one.said}")
            sys.stdout.flush()
    grades = Counter(one.grade for one in ended)
    print(", ".join(f"{grades[name]} {name}" for name in ("right", "less", "wrong", "over-sure")))
    print(*times_to_name(ended), sep="\n")
    return int(bool(grades["wrong"] or grades["over-sure"]))


def times_to_name(ended: list[EndedJob]) -> Iterator[str]:
    """`crash: named after 1.6 s (median), at most 4.0 s, in 41 jobs`, for the kinds of those that were right."""
    by_kind: dict[str, list[float]] = {}
    for one in ended:
        if one.grade == "right" and one.to_name_s is not None:
            by_kind.setdefault(one.kind, []).append(one.to_name_s)
    for kind, seconds in sorted(by_kind.items()):
        many = f"in {len(seconds)} jobs" if len(seconds) > 1 else "in 1 job"
        yield f"{kind}: named after {median(seconds):.1f} s (median), at most {max(seconds):.1f} s, {many}"


if __name__ == "__main__":
    raise SystemExit(main())
