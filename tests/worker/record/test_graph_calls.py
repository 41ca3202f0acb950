"""Which call has made an autograd node, by the node's number."""

from __future__ import annotations

from gpuwatch.worker.record.autograd_graph import GraphCalls


def laid_out(*calls):
    found = GraphCalls(0)
    found.calls = [*calls]  # names stand for modules here
    return [call.info if (call := found.innermost(number)) is not None else None for number in range(10)]


def test_the_innermost_call_is_found():
    """In the order in which they return: a child before its parent."""
    assert laid_out(("norm", 3, 5), ("act", 5, 6), ("block", 2, 8), ("head", 8, 9), ("", 1, 9)) == [
        None,
        "",
        "block",
        "norm",
        "norm",
        "act",
        "block",
        "block",
        "head",
        None,
    ]


def test_a_call_without_nodes_and_one_that_made_all_of_its_parents():
    assert laid_out(("identity", 4, 4), ("fc", 2, 6), ("wrapper", 2, 6)) == [None] * 2 + ["fc"] * 4 + [None] * 4


def test_no_calls():
    assert laid_out() == [None] * 10
