"""A rank that goes on as another program (os.exec): what that one computes is seen, or the run is not clean."""

import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample(1, of="a rank that goes on as another program")]


@pytest.mark.parametrize("how", [(), ("joins",)], ids=["alone", "in a group"])
@pytest.mark.parametrize("bad", [True, False], ids=["bad", "clean"])
def test_it_is_watched_again_below_gpuwatch_run(bench, how, bad):
    arguments = (*how, *(("bad",) if bad else ()))
    watched = bench.gpuwatch("run", "--preflight", "off", "--", sys.executable, bench.script("goes_on.py"), *arguments)

    kind, rank = watched.verdict["kind"], watched.report["ranks"][0]
    assert watched.report["run"]["attempts"] == 2
    assert [each["statement"] for each in watched.report["attempts"]] == ["became another program"]
    if bad:
        assert (watched.code, kind, watched.verdict["value"]) == (4, "overflow", "nan")
    else:
        assert (watched.code, kind, watched.verdict["certainty"]) == (0, "clean", "established")
        assert (watched.stdout, rank["attempt"], rank["state"]) == ("went on\n", 1, "finished")


def test_it_is_not_clean_below_gpuwatch_launch(bench):
    watched = bench.launch("goes_on.py", "--preflight", "off", nproc=1, args=("bad",))

    assert (watched.code, watched.stdout) == (6, "went on\n")
    assert (watched.verdict["kind"], watched.report["ranks"][0]["state"]) == ("unknown", "unwatched")
    assert watched.verdict["missing"] == ["rank 0 became another program (os.exec), which is not watched"]
