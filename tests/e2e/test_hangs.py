"""A job that stands still: the rank that the others wait for is named, with the line where it stands."""

import pytest

pytestmark = pytest.mark.slow
ABORT = ("--hang-timeout", "10", "--on-hang", "abort", "--preflight", "off")


@pytest.mark.sample(2, of="a rank that does not come")
@pytest.mark.parametrize(
    ("how", "place", "line"),
    [
        ("forward", "in the forward of batch 3, in `0` (Block)", "in forward: time.sleep(0.01)"),
        ("backward", "in the backward of batch 3", "in backward: time.sleep(0.01)"),
        ("data", "outside of a forward, after batch 2", "in load_batch: time.sleep(0.01)"),
        ("checkpoint", "outside of a forward, after batch 2", "in save_checkpoint: time.sleep(10_000)"),
        ("stopped", "stopped (by SIGSTOP, Ctrl-Z or a debugger), outside of a forward, after batch 2", ""),
    ],
)
def test_it_is_named_with_what_it_does(bench, how, place, line):
    run = bench.launch("hang.py", *ABORT, nproc=3, args=("--how", how))

    verdict = run.verdict
    assert run.code == 5
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "supported")
    assert verdict["statement"].startswith("Rank 1 did not come to the backward's reduction of gradients")
    assert place in verdict["statement"]
    assert line in verdict["statement"]
    assert {entry["rank"] for entry in verdict["cascade"]} == {0, 2}
    assert all(rank["stack"] or rank["rank"] == 1 for rank in run.report["ranks"])
    assert verdict["statement"] in run.stderr  # at once, while it stood still


def test_in_a_collective_of_the_scripts_own_it_is_established(bench):
    run = bench.launch("hang.py", *ABORT, nproc=3, args=("--how", "apart"))

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "established")
    assert verdict["statement"].startswith("Rank 1 did not come to barrier, in which ranks 0, 2 have waited")


@pytest.mark.sample(1, of="slow and healthy")
@pytest.mark.parametrize("how", ["evaluates", "computes"])
def test_what_is_slow_and_healthy_is_not_ended(bench, how):
    """One rank evaluates for many times the limit, the others wait for it; or all compute what nobody sees."""
    run = bench.launch("hang.py", *ABORT, nproc=2, args=("--how", how))

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert "did not come" not in run.stderr


def test_without_abort_the_job_goes_on_and_a_stall_that_passes_is_no_verdict(bench):
    run = bench.launch("hang.py", "--hang-timeout", "10", "--preflight", "off", nproc=2, args=("--how", "sleeps"))

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert "Rank 1 did not come to the backward's reduction of gradients" in run.stderr
    assert "to have it ended: --on-hang abort" in run.stderr
