"""A rank that answers with wrong numbers, or that has no memory, is named before the training starts."""

import pytest

pytestmark = pytest.mark.slow
NEVER = ("--preflight-timeout", "3000")


def run_wrong(bench, way: str, command: str, nproc: int):
    """The finished run with a wrong rank 1. No deadline is waited for: it would be beyond that of the test."""
    wrong = {"WRONG_RANK": way, "PYTHONPATH": bench.script("wrong_rank")}
    if command == "launch":
        return bench.launch("clean.py", *NEVER, nproc=nproc, **wrong)
    small = ("--alloc", "16MiB", "--bandwidth-size", "64KiB")
    return bench.gpuwatch("check", "--nproc-per-node", str(nproc), *NEVER, *small, **wrong)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("way", "command", "nproc", "stage", "words"),
    [
        ("adds wrong", "launch", 2, "node group", "rank 1 computes wrong sums: all_reduce over 2 ranks gave"),
        (
            "puts in wrong",
            "launch",
            3,
            "node group",
            "in every pair, while the other ranks compute right sums with each other",
        ),
        ("sends wrong", "launch", 2, "node group", "sends wrong values in all_gather"),
        ("broadcasts wrong", "check", 3, "node group", "sends wrong values in broadcast"),
        ("another matmul", "check", 3, "compute", "gets a different matmul result"),
        ("full", "launch", 2, "allocation", "64 MiB could not be allocated on cpu: the largest available block"),
    ],
)
def test_the_wrong_rank_is_named(bench, way, command, nproc, stage, words):
    run = run_wrong(bench, way, command, nproc)

    assert run.code == 3
    assert "rank 0 step" not in run.stdout
    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["stage"]) == ("preflight", 1, stage)
    assert words in verdict["statement"]
    assert verdict["next"]
    outcomes = {rank["rank"]: rank["preflight"]["outcome"] for rank in run.report["ranks"]}
    assert outcomes[1] == "failed"
    assert all(outcomes[rank] in ("ok", "victim") for rank in outcomes if rank != 1)


def test_two_ranks_whose_matmul_differs_name_nobody(bench):
    run = run_wrong(bench, "another matmul", "check", 2)

    assert run.code == 3
    assert (run.verdict["stage"], run.verdict["rank"]) == ("compute", None)
    assert "undetermined" in run.verdict["statement"]


def test_a_slow_rank_is_told_and_stops_nothing(bench):
    run = run_wrong(bench, "slow matmul", "check", 3)

    assert run.code == 0
    told = [one for one in run.report["preflight"]["findings"] if one["stage"] == "compute" and 1 in one["ranks"]]
    assert [one["grade"] for one in told] == ["warn"]
    assert "times the median of all 3 ranks" in told[0]["sentence"]
