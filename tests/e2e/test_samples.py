"""The report names the samples of the batch that overflowed."""

from __future__ import annotations

import re

import pytest


@pytest.mark.slow
@pytest.mark.sample(1, of="the samples of a batch")
def test_the_samples_of_the_batch_are_named(bench):
    run = bench.launch("one_sample.py", "--preflight", "off")
    assert (run.code, run.verdict["module"], run.verdict["phase"]) == (4, "up", "forward")
    batch, rank = run.verdict["batch"], run.verdict["rank"]
    (line,) = [line for line in run.verdict["evidence"] if "data set" in line]
    place = f"batch {batch} of rank {rank} is batch {batch} of epoch 0 of its DataLoader, made by worker 0: "
    assert line.startswith(f"{place}8 samples of data set __main__.Notes (index ")
    indices = [int(each) for each in re.search(r"index ([\d, ]+)", line)[1].split(", ")]
    assert 77 in indices
    assert len(indices) == 8
    assert "; path " + ", ".join(f"notes/{index:03}.txt" for index in indices) in line
    assert run.verdict["operation"]["element"] == f"all of row {indices.index(77)} (dim 0)"
    cause = run.verdict["cause"]
    assert (cause["kind"], cause["certainty"]) == ("data", "established")
    sample = f"sample {indices.index(77)} of 8 (index 77 of data set `__main__.Notes`)"
    assert sample in cause["statement"]
    assert sample in run.verdict["next"][0]
