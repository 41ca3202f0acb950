"""Real out-of-memory kills: the kernel ends a process of a cgroup that has a limit."""

import sys
from collections.abc import Iterator

import pytest

from ..memory_cgroups import JobCgroup, job_cgroup, why_no_cgroup

pytestmark = [pytest.mark.slow, pytest.mark.sample(1, of="a lack of memory")]
LIMIT = 1400 << 20


@pytest.fixture
def cgroup() -> Iterator[JobCgroup]:
    if reason := why_no_cgroup():
        pytest.skip(reason)
    with job_cgroup(LIMIT, ("launch", "rank0", "rank1")) as made:
        yield made


def launch(bench, cgroup, *arguments):
    launch = ("-m", "gpuwatch.cli.main", "launch", "--nproc-per-node", "2", "--preflight", "off")
    command = cgroup.inside(sys.executable, *launch, bench.script("eats.py"), *arguments)
    return bench.finish(bench.start_program(*command))


def test_a_rank_that_the_kernel_ends_is_told_with_the_limit_and_what_was_used(bench, cgroup):
    run = launch(bench, cgroup)

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"], verdict["signal"]) == (5, "lost", 1, "SIGKILL")
    assert "was killed by SIGKILL in the forward of batch 2" in verdict["statement"]
    sizes = "limit 1.37 GiB, used up to 1.37 GiB"
    assert (
        f": its memory cgroup was out of memory ({sizes}), and the kernel killed 1 process of it."
        in (verdict["statement"])
    )
    assert any("rank 1 had up to" in line and "in memory" in line for line in verdict["evidence"])
    assert "Give the job more memory on" in verdict["next"][0]


def test_a_worker_of_a_data_loader_that_the_kernel_ends_is_told_so(bench, cgroup):
    run = launch(bench, cgroup, "loader")

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"]) == (1, "crash", 1)
    assert "DataLoader worker (pid" in verdict["statement"]
    assert any("its memory cgroup was out of memory (limit 1.37 GiB" in line for line in verdict["evidence"])
    assert "Give the job more memory on" in verdict["next"][0]


def test_a_rank_in_a_cgroup_of_its_own_is_told_by_that_one(bench, cgroup, port):
    """Version 1 counts a kill in the cgroup of the killed process alone."""
    script = ("sh", bench.script("in_own_cgroups.sh"), str(port), str(cgroup.folder))
    run_it = ("-m", "gpuwatch.cli.main", "run", "--preflight", "off", "--")
    command = cgroup.inside(sys.executable, *run_it, *script, sys.executable, bench.script("eats.py"))
    run = bench.finish(bench.start_program(*command))

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"]) == ("lost", 1)
    assert "its memory cgroup was out of memory (limit 1.37 GiB" in verdict["statement"]
