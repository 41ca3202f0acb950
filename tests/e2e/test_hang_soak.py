"""Each way to stand still ten times, with other ranks, batches and sizes of a job: the right one is named, or none."""

from __future__ import annotations

import random

import pytest

from .test_hangs import ABORT
from .test_meetings import NEVER, run_of

pytestmark = pytest.mark.soak
SEEDS = range(1, 11)


def nproc_of(how: str, seed: int, least: int = 3) -> int:
    return random.Random(f"{how} {seed} ranks").randrange(least, 6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["forward", "backward", "data", "checkpoint", "stopped", "apart"])
def test_a_rank_that_does_not_come(bench, how, seed):
    nproc = nproc_of(how, seed, 2)
    rank = random.Random(f"{how} {seed}").randrange(nproc)
    run = bench.launch("hang.py", *ABORT, nproc=nproc, args=("--how", how, "--rank", str(rank)))

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (5, "hang", rank)
    assert run.verdict["certainty"] in ("established", "supported")
    assert all(one["stack"] for one in run.report["ranks"] if one["rank"] != rank)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "how",
    [
        *("barrier", "monitored", "operation", "skip", "order", "forward", "loader", "optimizer", "checkpoint"),
        *("stopped", "leaves slowly"),
    ],
)
def test_ranks_that_do_not_meet(bench, how, seed):
    run, rank = run_of(bench, how, nproc_of(how, seed), seed, *ABORT)

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (5, "hang", rank)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_subgroup_of_four_of_eight_ranks(bench, seed):
    run, rank = run_of(bench, "subgroup", 8, seed, *ABORT)

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (5, "hang", rank)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["operation", "skip", "order", "send"])
def test_where_it_cannot_be_known_none_is_named(bench, how, seed):
    run, _ = run_of(bench, how, 3 if how == "send" else 2, seed, *ABORT)

    assert (run.verdict["kind"], run.verdict["rank"], run.verdict["certainty"]) == ("hang", None, "unknown")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["size", "dtype", "exit", "_exit"])
def test_what_ends_the_others(bench, how, seed):
    run, rank = run_of(bench, how, nproc_of(how, seed), seed, *ABORT)

    assert run.verdict["rank"] == rank
    assert run.verdict["kind"] in ("crash", "hang")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["barrier", "subgroup"])
def test_a_groups_timeout(bench, how, seed):
    run, rank = run_of(bench, how, 4, seed, *NEVER, more=("--timeout", "15"))

    assert (run.verdict["kind"], run.verdict["rank"]) == ("hang", rank)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_raised_and_does_not_end(bench, seed):
    run, rank = run_of(bench, "raises", nproc_of("raises", seed), seed, *ABORT)

    assert (run.verdict["kind"], run.verdict["rank"]) == ("crash", rank)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("how", "often", "part"),
    [
        ("constant", "constantly", "forward"),
        ("sometimes", "now and then", "forward"),
        ("loader", "constantly", "outside"),
    ],
)
def test_a_slow_rank(bench, how, often, part, seed):
    nproc = nproc_of(how, seed)
    rank = random.Random(f"{how} {seed}").randrange(nproc)
    run = bench.launch("slow.py", "--preflight", "off", nproc=nproc, args=("--how", how, "--rank", str(rank)))

    found = [(slow["rank"], slow["how"], slow["part"]) for slow in run.report["steps"]["stragglers"]]
    assert (run.code, run.verdict["kind"], found) == (0, "clean", [(rank, often, part)])


@pytest.mark.parametrize("seed", SEEDS)
def test_of_healthy_ranks_none_is_slow(bench, seed):
    nproc = nproc_of("none", seed)
    run = bench.launch("slow.py", "--preflight", "off", nproc=nproc, args=("--how", "none"))

    assert (run.code, run.verdict["kind"], run.report["steps"]["stragglers"]) == (0, "clean", [])
