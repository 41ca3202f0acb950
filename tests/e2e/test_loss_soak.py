"""Each way to lose a rank ten times, with other ranks and batches; two ranks that fail 50 ms apart, twenty times."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from .conftest import Run

pytestmark = pytest.mark.soak
SEEDS = range(1, 11)
HOW = ("raises", "allocates", "SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL")


def arguments(bench, how, rank, batch, *more):
    return ("--how", how, "--rank", str(rank), "--batch", str(batch), "--folder", str(bench.cwd), *more)


def is_right(run, how, rank):
    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"]) == ("lost" if how.startswith("SIG") else "crash", rank)
    if verdict["kind"] == "lost":
        assert verdict["signal"] == how
    assert run.report["ranks"][rank]["batch"] is not None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", HOW)
def test_a_rank_is_lost(bench, how, seed):
    chance = random.Random(f"{how} {seed}")
    nproc = chance.randrange(2, 5)
    rank, batch = chance.randrange(nproc), chance.randrange(1, 6)
    run = bench.launch("fails.py", "--preflight", "off", nproc=nproc, args=arguments(bench, how, rank, batch))

    is_right(run, how, rank)
    assert run.verdict["batch"] == batch


@pytest.mark.parametrize("seed", range(1, 21))
def test_of_two_that_fail_50_ms_apart_the_first_is_named(bench, seed):
    chance = random.Random(f"two {seed}")
    nproc = chance.randrange(2, 5)
    rank, second = chance.sample(range(nproc), 2)
    how, then = chance.choice(HOW), chance.choice(HOW)
    more = ("--second", str(second), "--then", then)
    run = bench.launch(
        "fails.py", "--preflight", "off", nproc=nproc, args=arguments(bench, how, rank, chance.randrange(1, 6), *more)
    )

    failed = {int(path.name.rpartition("-")[2]): int(path.read_text()) for path in bench.cwd.glob("failed-*")}
    first = min(failed, key=lambda each: failed[each])
    named = run.verdict["rank"]
    if f"(and rank {first} at the same point)" in run.verdict["statement"]:  # a loaded machine cannot tell
        first = named
    is_right(run, {rank: how, second: then}[first], first)


@pytest.mark.parametrize("seed", SEEDS)
def test_dev_shm_is_full(bench, seed):
    """In a mount namespace with a small one of its own."""
    chance = random.Random(f"shm {seed}")
    rank, batch = chance.randrange(2), chance.randrange(1, 6)
    inside = 'mount -t tmpfs -o size=400m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", sys.executable, "-m", "gpuwatch.cli.main", "launch"]
    if subprocess.run([*command[:5], "sh", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    done = subprocess.run(
        [
            *(*command, "--nproc-per-node", "2", "--preflight", "off", bench.script("fails.py")),
            *arguments(bench, "shm", rank, batch),
        ],
        cwd=bench.cwd,
        env=bench.environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    run = Run(done.returncode, done.stdout, done.stderr, bench.cwd)

    is_right(run, "shm", rank)
    assert "No space left on device" in run.stderr
