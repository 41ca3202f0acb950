"""Ranks of one node that stand in operations that do not match."""

from __future__ import annotations

import pytest
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation
from gpuwatch.core.recorder.operation_mismatch import all_stand_in_mismatch


def table(operation, *, number=7, at=7, since_s=12.0, elements=8, phase="waiting", members="0-1", begun=7):
    issued = IssuedOperation(number, operation, "float32", elements)
    return [GroupState("0", members, 2, begun, begun - 1, phase, at, since_s, [issued])]


def test_both_stand_in_different_operations_of_one_number():
    assert all_stand_in_mismatch({0: table("all_reduce"), 1: table("all_gather")}, 10.0) == [0, 1]
    assert all_stand_in_mismatch({0: table("all_reduce"), 1: table("all_reduce", elements=5)}, 10.0) == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        table("all_reduce"),
        table("all_gather", since_s=3.0),
        table("all_gather", phase="none", at=0),
        table("all_gather", number=6, at=6, begun=6),
        table("all_gather", members="0-2"),
        [],
    ],
    ids=["the same", "a moment ago", "it went on", "another number", "another group", "no table"],
)
def test_what_may_still_come_together_is_none(other):
    assert all_stand_in_mismatch({0: table("all_reduce"), 1: other}, 10.0) == []


def test_a_member_that_has_not_come_may_let_them_end():
    """Operations of two names may suit each other. A member of another node is never seen."""
    tables = {rank: table(name, members="0-2") for rank, name in enumerate(("all_gather", "all_gather_into_tensor"))}
    assert all_stand_in_mismatch(tables, 10.0) == []
    assert all_stand_in_mismatch({**tables, 2: table("all_gather", members="0-2", at=6)}, 10.0) == []
