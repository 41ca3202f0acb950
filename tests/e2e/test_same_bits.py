"""A watched run computes what an unwatched one computes, bit for bit, in every way to train."""

import pytest


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "amp", "fsdp"])
def test_fifty_steps_are_the_same(bench, kind):
    plain = bench.torchrun("--nproc-per-node", "2", bench.script("same_bits.py"), kind)
    watched = bench.launch("same_bits.py", "--preflight", "off", args=(kind,))

    assert (plain.code, watched.code) == (0, 0)
    assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert len(plain.stdout.splitlines()) == 2 * 52
    ranks = watched.report["ranks"]
    assert [rank["faults"] for rank in ranks] == [[], []]
    assert [rank["step"] for rank in ranks] == [50, 50]
    phases = {frame["phase"] for rank in ranks for frame in rank["frames"]}
    assert phases & {"backward", "optimizer", "collective"}, "it was watched"
