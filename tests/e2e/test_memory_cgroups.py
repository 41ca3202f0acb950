"""Real out-of-memory kills: the kernel ends a process of a cgroup that has a limit."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample(1, of="a lack of memory")]
LIMIT = 1400 << 20
ENTER = 'echo $$ > "$0" && exec "$@"'


class JobCgroup:
    """A memory cgroup with a limit, and one below it for each part of a job: in version 2 it has no process itself."""

    def __init__(self, base: Path) -> None:
        self.is_first = base.name == "memory"
        self.folder = base / f"gpuwatch-test-{os.getpid()}"
        self.parts = [self.folder / name for name in ("launch", "rank0", "rank1")]

    def make(self, held: ExitStack) -> None:
        """Raises OSError."""
        for folder in (self.folder, *self.parts):
            if folder == self.parts[0] and not self.is_first:
                (self.folder / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
            held.callback(folder.rmdir)
        (self.folder / ("memory.limit_in_bytes" if self.is_first else "memory.max")).write_text(str(LIMIT))

    def inside(self, *command: str) -> list[str]:
        """The command, in the first part."""
        return ["sh", "-c", ENTER, str(self.parts[0] / "cgroup.procs"), *command]


@pytest.fixture
def cgroup() -> Iterator[JobCgroup]:
    if psutil.swap_memory().total:
        pytest.skip("the machine swaps: it would not run out of memory")
    bases = [path for path in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if path.is_dir()]
    if not bases:
        pytest.skip("no memory cgroups")
    made = JobCgroup(bases[0])
    with ExitStack() as held:
        try:
            made.make(held)
        except OSError as error:
            pytest.skip(f"cannot make a memory cgroup: {error}")
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
    sizes = "limit 1.47 GB, used up to 1.47 GB"
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
    assert any("its memory cgroup was out of memory (limit 1.47 GB" in line for line in verdict["evidence"])
    assert "Give the job more memory on" in verdict["next"][0]


def test_a_rank_in_a_cgroup_of_its_own_is_told_by_that_one(bench, cgroup, port):
    """Version 1 counts a kill in the cgroup of the killed process alone."""
    script = ("sh", bench.script("in_own_cgroups.sh"), str(port), str(cgroup.folder))
    run_it = ("-m", "gpuwatch.cli.main", "run", "--preflight", "off", "--")
    command = cgroup.inside(sys.executable, *run_it, *script, sys.executable, bench.script("eats.py"))
    run = bench.finish(bench.start_program(*command))

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"]) == ("lost", 1)
    assert "its memory cgroup was out of memory (limit 1.47 GB" in verdict["statement"]
