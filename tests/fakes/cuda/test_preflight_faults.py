"""The preflight over the real ProcessGroupNCCL, with a fault in one rank's NCCL: that rank, or "not known"."""

from __future__ import annotations

import re

import pytest
from preflight_faults import DEADLINES_S, FAULTS, SILENT, TOLD, WRONG, check, places

SAMPLE = {(3, "fail-op", 1), (2, "die-op", 0), (2, "hang-init", 1), (3, "silent-op", 2), (3, "bad-sum", 1)}
CASES = [(nproc, fault, at) for nproc in DEADLINES_S for fault in FAULTS for at in places(nproc)]


def test_without_a_fault_nobody_is_named(tmp_path):
    found = check(tmp_path, 2)
    assert (found.code, found.verdict["rank"], found.backends) == (0, None, {"nccl"}), found.log


@pytest.mark.parametrize(
    ("nproc", "fault", "at"),
    [pytest.param(*case, marks=[] if case in SAMPLE else [pytest.mark.soak]) for case in CASES],
)
def test_a_fault_of_nccl_is_laid_to_its_rank_or_to_none(tmp_path, nproc, fault, at):
    found = check(tmp_path, nproc, fault, at)

    assert (found.code, found.backends) == (3, {"nccl"}), found.log
    is_known = nproc > 2 or fault not in SILENT
    expected = (at, "established") if is_known else (None, "unknown")
    assert (found.verdict["rank"], found.verdict["certainty"]) == expected, found.verdict
    words = {
        **dict.fromkeys(TOLD, f"rank {at} .*(failed|died)"),
        **dict.fromkeys(WRONG, f"rank {at} computes wrong sums"),
    }
    assert re.search(words.get(fault, "" if is_known else "the rank at fault is unknown"), found.verdict["statement"])
    told = [
        entry["how"] for entry in found.verdict["cascade"] if f"it stopped, as rank {at} had failed" in entry["how"]
    ]
    assert (len(told) == nproc - 1) == (fault in TOLD), found.verdict
