"""RPC's DistributedOptimizer steps in TorchScript, in threads of RPC on the rank that holds the parameters."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample(1)]


def test_its_steps_are_counted_and_change_no_bit(bench):
    plain = bench.torchrun("--nproc-per-node", "2", bench.script("rpc.py"))
    watched = bench.launch("rpc.py", "--preflight", "off")
    assert (plain.code, watched.code) == (0, 0)
    assert watched.stdout.splitlines()[:9] == plain.stdout.splitlines()[:9]
    assert len(plain.stdout.splitlines()) == 9
    assert watched.verdict["kind"] == "clean"
    ranks = watched.report["ranks"]
    assert [rank["faults"] for rank in ranks] == [[], []]
    assert [rank["step"] for rank in ranks] == [5, 5]
    frames = [(frame["module"], frame["phase"]) for frame in ranks[1]["frames"]]
    assert frames[-2:] == [("enter", "optimizer"), ("leave", "optimizer")]
    assert ("leave", "collective") in frames, "the gradients that the step got"


def test_a_weight_that_the_last_step_made_bad(bench):
    watched = bench.launch("rpc.py", "--preflight", "off", args=("bad",))
    verdict = watched.verdict
    assert watched.code == 4
    place = [verdict[key] for key in ("rank", "phase", "module", "role", "batch")]
    assert place == [1, "optimizer", "leave", "weight", 4]
    assert verdict["certainty"] == "supported"
