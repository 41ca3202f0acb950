"""A job that stands still while a node does not answer."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.agent_events import RankLook
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import EventMessage, NodeBye

BARRIER = StackLine("/torch/distributed/distributed_c10d.py", 1, "barrier")
OWN = StackLine("/home/me/train.py", 7, "main", "work()")


def look(rank, *stack):
    return EventMessage(RankLook(RunPosition(rank, batch=4), 1, 300.0, "script", state="S", stack=[*stack, OWN]))


def verdict_of(make, *looks, lost=("a1",)):
    said = [
        ("a0", 1, make.hello("a0", "h0", nproc=2, nodes=2)),
        ("a1", 1, make.hello("a1", "h1", nproc=2, nodes=2)),
        *(("a0", 2 + n, NodeBeat([make.state(rank)], {})) for n, rank in enumerate((0, 1))),
        *(("a1", 2 + n, NodeBeat([make.state(rank)], {})) for n, rank in enumerate((2, 3))),
        *(("a0", 10 + n, one) for n, one in enumerate(looks)),
        ("a0", 20, NodeBye("signal", 2)),
    ]
    return decide(fold(said, lost))


def test_it_is_the_node_and_no_hang_without_a_culprit(make):
    verdict = verdict_of(make, look(0, BARRIER), look(1, BARRIER))

    assert (verdict.kind, verdict.certainty, verdict.host, verdict.rank) == ("lost", "supported", "h1", None)
    assert [one.rank for one in verdict.concurrent] == [2, 3]
    assert verdict.statement == (
        "Node h1 (ranks 2, 3) went silent: the node, or the link to it, is lost. Ranks 0, 1 wait for what is there."
    )
    assert verdict.next == ["Check whether h1 is up; if not, leave it out of the next run."]


def test_two_nodes_of_one_name_are_both_silent(make):
    said = [
        *((f"a{node}", 1, make.hello(f"a{node}", "vm" if node else "h0", nproc=1, nodes=3)) for node in range(3)),
        *((f"a{rank}", 2, NodeBeat([make.state(rank)], {})) for rank in range(3)),
        ("a0", 10, look(0, BARRIER)),
        ("a0", 20, NodeBye("signal", 2)),
    ]
    verdict = decide(fold(said, ("a1", "a2")))

    assert (verdict.kind, verdict.certainty, verdict.host) == ("lost", "supported", "vm")
    assert [one.rank for one in verdict.concurrent] == [1, 2]


@pytest.mark.parametrize("lost", [(), ("a0",)])
def test_a_node_that_is_heard_is_not_named_for_ranks_that_do_not_answer(make, lost):
    verdict = verdict_of(make, look(0, BARRIER), look(1, BARRIER), lost=lost)
    assert (verdict.kind, verdict.certainty) == ("hang", "unknown")


def test_a_rank_that_is_elsewhere_is_still_named(make):
    verdict = verdict_of(make, look(0, BARRIER), look(1))
    assert (verdict.kind, verdict.rank) == ("hang", 1)
