"""A rank that the others wait for in every step, or now and then: named with its cost. What it takes more is a multiple
of what a step takes, so that the speed of the machine plays no part."""

import pytest

from ..waiting import until
from .conftest import scratch_folders

pytestmark = pytest.mark.slow
PLAIN = ("--preflight", "off")


@pytest.mark.sample(1, of="a slow rank")
@pytest.mark.parametrize(
    ("how", "often", "part", "nproc", "rank"),
    [
        ("constant", "constantly", "forward", 3, 1),
        ("sometimes", "now and then", "forward", 4, 2),
        ("loader", "constantly", "outside", 3, 0),
    ],
)
def test_it_is_named_with_what_it_costs(bench, how, often, part, nproc, rank):
    run = bench.launch("slow.py", *PLAIN, nproc=nproc, args=("--how", how, "--rank", str(rank)))

    assert (run.code, run.verdict["kind"]) == (0, "clean"), "it changes no verdict"
    (slow,) = run.report["steps"]["stragglers"]
    assert (slow["rank"], slow["how"], slow["part"], slow["loud"]) == (rank, often, part, True)
    assert slow["text"] in " ".join(run.stderr.split())
    seconds = {times["rank"]: times["seconds"] for times in run.report["steps"]["ranks"]}
    assert all(seconds[other]["waiting"] > seconds[rank]["waiting"] for other in seconds if other != rank)
    assert slow["text"] in (run.cwd / "gpuwatch-runs" / "latest" / "report.html").read_text().replace("&#39;", "'")


@pytest.mark.sample(1, of="a slow rank, told while it runs")
@pytest.mark.parametrize("how", ["constant", "sometimes"])
def test_while_it_runs_it_is_told_once(bench, how):
    """It has 1.3 times the work of the other one, in each step or in every fourth. The job ends once it was told."""
    told = bench.cwd / "told"
    process = bench.start(
        *("gpuwatch.cli.main", "launch", "--nproc-per-node", "2", *PLAIN, bench.script("slow.py")),
        *("--how", how, "--works", "--steps", "20000", "--until", str(told)),
    )
    assert process.stderr is not None
    line = next((line for line in process.stderr if "costs the job" in line), "")
    told.touch()
    run = bench.finish(process)

    assert "Rank 1 on " in line
    assert "Most of the difference is in the forward." in line
    assert (run.code, run.verdict["kind"]) == (0, "clean")
    log = (run.cwd / "gpuwatch-runs" / "latest" / "logs" / "collector.log").read_text()
    assert line.removeprefix("gpuwatch: ").strip() in log


def test_its_line_is_told_once_it_was_looked_at(bench):
    """It is looked at from the second comparison of the ranks on. The job ends after some looks."""
    told = bench.cwd / "told"
    process = bench.start(
        *("gpuwatch.cli.main", "launch", "--nproc-per-node", "2", *PLAIN, bench.script("slow.py")),
        *("--how", "loader", "--usual", "0.01", "--steps", "20000", "--until", str(told)),
    )
    assert process.stderr is not None
    next((line for line in process.stderr if "costs the job" in line), "")
    (scratch,) = scratch_folders(bench.pids | {process.pid})
    (stack,) = scratch.glob("rank-00001.*.stack")
    until(lambda: stack.read_text().count("most recent call first") >= 13, "13 looks at rank 1")
    answers = {path.name: path.stat().st_size for path in scratch.glob("*.stack")}
    told.touch()
    run = bench.finish(process)

    (slow,) = run.report["steps"]["stragglers"]
    assert slow["looks"] >= 12
    first = slow["lines"][0]
    assert (first["function"], first["code"]) == ("load_batch", "time.sleep(takes_s)")
    assert f"it was at slow.py:{first['line']} in load_batch: `time.sleep(takes_s)`" in slow["text"]
    assert f"it was at slow.py:{first['line']} in load_batch" in " ".join(run.stderr.split()), "on one screen"
    assert [size for name, size in answers.items() if name.startswith("rank-00000")] == [0], "the other was not asked"


@pytest.mark.parametrize("steps", [40, pytest.param(400, marks=pytest.mark.soak)])
def test_of_healthy_ranks_none_is_told(bench, steps):
    run = bench.launch("slow.py", *PLAIN, nproc=3, args=("--how", "none", "--steps", str(steps)))

    assert (run.code, run.verdict["kind"]) == (0, "clean")
    assert run.report["steps"]["stragglers"] == []
    assert "costs the job" not in run.stderr
    assert run.report["steps"]["compared"] > 30
    assert [times["timed"] for times in run.report["steps"]["ranks"]] == [steps] * 3
