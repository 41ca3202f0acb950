"""A job that stands still: the rank that the others wait for is named, with the line where it stands."""

import pytest

slow = pytest.mark.slow
TIMEOUT = ("--hang-timeout", "3", "--on-hang", "abort", "--preflight", "off")


@pytest.mark.parametrize(
    ("how", "line", "certainty"),
    [
        ("forward", "hang.py:41 in forward: time.sleep(0.01)", {"established", "supported"}),
        pytest.param("backward", "in backward: time.sleep(0.01)", {"supported"}, marks=slow),
        pytest.param("data", "in load_batch: time.sleep(0.01)", {"established", "supported"}, marks=slow),
        pytest.param("checkpoint", "in save_checkpoint: time.sleep(10_000)", {"established", "supported"}, marks=slow),
    ],
)
def test_the_rank_that_does_not_come_is_named_with_its_line(bench, how, line, certainty):
    run = bench.launch("hang.py", *TIMEOUT, nproc=3, args=("--how", how))

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["batch"]) == (
        "hang",
        1,
        {"forward": 3}.get(how, verdict["batch"]),
    )
    assert verdict["certainty"] in certainty
    assert line in verdict["statement"]
    assert "rank 1 did not come" in verdict["statement"].lower()
    assert run.code == 5
    assert {entry["rank"] for entry in verdict["cascade"]} == {0, 2}
    assert all(rank["stack"] for rank in run.report["ranks"])
