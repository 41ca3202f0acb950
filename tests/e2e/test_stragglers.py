"""A rank that the others wait for in every step, or now and then: named with its cost. What it takes more is a multiple
of what a step takes, so that the speed of the machine plays no part."""

import pytest

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


def test_of_healthy_ranks_none_is_told(bench):
    run = bench.launch("slow.py", *PLAIN, nproc=3, args=("--how", "none"))

    assert (run.code, run.verdict["kind"]) == (0, "clean")
    assert run.report["steps"]["stragglers"] == []
    assert run.report["steps"]["compared"] > 30
    assert [times["timed"] for times in run.report["steps"]["ranks"]] == [40, 40, 40]
