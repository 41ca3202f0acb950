"""What each rank had at the first bad element of a sum, and no more than is known."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.passed_values import RankSummand, element_line
from gpuwatch.core.events.read_tensors import ReducedElement

HALF = "; their sum is beyond 65504 (float16)"
PART = "; some of them alone are beyond 65504 (float16)"


def of(*own, index=(3, 5), largest=6e4):
    """Ranks from 0 on: what each had; None: it looked, and kept nothing; ...: it has not looked."""
    return [
        RankSummand(rank, None if one is ... else ReducedElement(list(index), one), largest)
        for rank, one in enumerate(own)
    ]


@pytest.mark.parametrize(
    ("summands", "words"),
    [
        (of(4.1e4, 3.9e4), f"4.10e+04 on rank 0, 3.90e+04 on rank 1{HALF}"),
        (of(1.0, -6.6e4), "-6.60e+04 on rank 1, 1.00e+00 on rank 0" + HALF),
        (of(3e4, 3e4), "3.00e+04 on rank 0, 3.00e+04 on rank 1"),
        (of(4e4, 4e4, -4e4), "4.00e+04 on rank 0, 4.00e+04 on rank 1, -4.00e+04 on rank 2" + PART),
        (of(6.6e4, None, largest=10.0), f"6.60e+04 on rank 0, at most 1.00e+01 on rank 1{HALF}"),
        (of(6.6e4, None), "6.60e+04 on rank 0, at most 6.00e+04 on rank 1" + PART),
        (of(6.6e4, ..., largest=None), "6.60e+04 on rank 0, unknown on rank 1"),
        (of(*[2e4] * 6), "2.00e+04 on rank 0, 2.00e+04 on rank 1, 2.00e+04 on rank 2, 2.00e+04 on rank 3, and 2 more "
         f"ranks{HALF}"),
    ],
)  # fmt: skip
def test_the_number_of_each_rank_against_the_largest_of_the_dtype(summands, words):
    assert element_line("it", summands, "float16") == f"element [3, 5] of it: {words}"


@pytest.mark.parametrize(
    "summands",
    [of(), of(None, None), of(..., ...), [*of(4e4), RankSummand(1, ReducedElement([0, 0], 4e4), 4e4)]],
)
def test_nothing_is_said_where_nobody_knows_or_ranks_have_looked_at_different_elements(summands):
    assert element_line("it", summands, "float16") == ""


def test_without_a_known_largest_number_no_sum_is_judged():
    assert element_line("it", of(4e4, 4e4), "int8") == "element [3, 5] of it: 4.00e+04 on rank 0, 4.00e+04 on rank 1"
