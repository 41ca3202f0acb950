"""The ways in which the jobs of ends.py end, whom each blames, and how the verdict on one is graded."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from statistics import median
from typing import NamedTuple


class BadEnd(NamedTuple):
    """One way to end. `blames`: the guilty rank, its node, all, or nobody; `kinds`: verdicts that are right."""

    how: str
    kinds: tuple[str, ...]
    blames: str = "guilty"
    says: str = ""
    """What the statement of a right verdict has."""


OUT_OF_MEMORY = "out of memory"
"""The kernel ends the rank, which has used what its job may (tests/memory_cgroups.py)."""
WAYS = [
    BadEnd("raises", ("crash",)),
    BadEnd("raises in the forward", ("crash",)),
    BadEnd("raises in a save", ("crash",)),
    BadEnd("raises before init", ("crash",)),
    BadEnd("all raise", ("crash",), "all"),
    BadEnd("unused", ("crash",), "all"),
    BadEnd("memory", ("crash",)),
    BadEnd("sys.exit", ("crash",)),
    BadEnd("raises, slow teardown", ("crash",)),
    BadEnd("sys.exit, slow teardown", ("crash",)),
    BadEnd("os._exit", ("crash", "lost")),
    BadEnd("os._exit(0)", ("crash", "hang")),
    BadEnd("SIGKILL", ("lost",)),
    BadEnd(OUT_OF_MEMORY, ("lost",), says="its memory cgroup was out of memory"),
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
    BadEnd("fault, sleeps", ("hang",)),
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


SLURM_WAYS = [
    *(way for way in WAYS if way.how in ("raises", "sys.exit", "SIGKILL", "SIGSEGV", "sleeps", "stopped")),
    *(way for way in WAYS if way.how in ("shorter loader", "preempted: no handler", "preempted: handler raises")),
    BadEnd("scancel", ("interrupted",), "nobody"),
    BadEnd("SIGTERM to the step of gpuwatch run", ("interrupted",), "nobody"),
    BadEnd("time limit", ("interrupted",), "nobody"),
    BadEnd("power off", ("lost",), "node"),
    BadEnd("link cut", ("lost",), "node"),
    BadEnd("slurmd killed", ("lost",), "node"),
    BadEnd("node down", ("lost",), "node"),
]
"""On a real SLURM (on_slurm.py). Of a node, it is the one that is not the head's."""


def jobs(
    seed: int, number: int, sizes: tuple[int, ...] = (2, 3, 4), ways: Sequence[BadEnd] = WAYS
) -> list[tuple[BadEnd, int, int]]:
    """(way, guilty rank, number of ranks); each way once before any comes again."""
    rng = random.Random(seed)
    found = []
    while len(found) < number:
        for way in rng.sample(ways, len(ways)):
            nproc = rng.choice(sizes)
            found.append((way, rng.randrange(nproc), nproc))
    return found[:number]


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
    return "right" if way.says in verdict["statement"] else "less"


def grade_node(way: BadEnd, host: str, ranks: Collection[int], verdict: dict) -> str:
    """The same where a node was at fault, with the ranks that are on it."""
    named = {verdict["rank"]} - {None} | {one["rank"] for one in verdict["concurrent"]}
    if not named <= set(ranks) or verdict["host"] not in (None, host):
        return "wrong"
    if verdict["host"] is None:
        return "less" if not named or verdict["certainty"] != "established" else "over-sure"
    return "right" if verdict["kind"] in way.kinds else "wrong"


def ranks_at_fault(way: BadEnd, guilty: int, nproc: int) -> set[int]:
    """Whom a right verdict names."""
    return {"all": set(range(nproc)), "nobody": set(), "guilty": {guilty}}[way.blames]


def text_of(verdict: dict) -> str:
    """`hang, supported: Rank 1 is at train.py:7 ...`"""
    return f"{verdict['kind']}, {verdict['certainty']}: {verdict['statement']}"


def times_to_name(ended: list[EndedJob]) -> Iterator[str]:
    """`crash: named after 1.6 s (median), at most 4.0 s, in 41 jobs`, for the kinds of those that were right."""
    by_kind: dict[str, list[float]] = {}
    for one in ended:
        if one.grade == "right" and one.to_name_s is not None:
            by_kind.setdefault(one.kind, []).append(one.to_name_s)
    for kind, seconds in sorted(by_kind.items()):
        many = f"in {len(seconds)} jobs" if len(seconds) > 1 else "in 1 job"
        yield f"{kind}: named after {median(seconds):.1f} s (median), at most {max(seconds):.1f} s, {many}"
