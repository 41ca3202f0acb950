"""`gpuwatch top` while ranks wait in DDP's backward, long before that counts as a stall: who waits for whom."""

import pytest

from ..waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.sample(1)]


def test_top_says_who_waits_for_whom_in_a_backwards_reduction(bench, tmp_path):
    job = bench.start(
        *("gpuwatch.cli.main", "launch", "--nproc-per-node", "2", "--preflight", "off", "--run-name", "shown"),
        *("--hang-timeout", "0", bench.script("waits_in_backward.py"), str(tmp_path)),
    )
    screens = [""]

    def is_told() -> bool:
        assert job.poll() is None, job.communicate()
        screens[0] = bench.gpuwatch("top", "shown", "--once").stdout
        return "rank 1 is waited for" in screens[0]

    try:
        until(is_told, "the rank that is waited for", lambda: screens[0], look_s=0.5)
        text = " ".join(screens[0].split())
        assert "the backward's reduction of gradients, in which rank 0 has waited for" in text
        assert "Rank 1 is at" in text and "in stand, in the backward of batch 0" in text, screens[0]
    finally:
        (tmp_path / "go").touch()
    run = bench.finish(job)
    assert (run.code, run.verdict["kind"]) == (0, "clean"), "it changes nothing for the job"
