"""Which ranks that a signal killed got it all at once, from outside."""

from __future__ import annotations

import signal

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import EventMessage, NodeBye

S = 10**9
NOON = 10**6 * S
TERM, USR1, KILL = -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGKILL


def dies(rank, code=TERM, *, by="itself", after_s=0.0, batch=4):
    """So long after noon, by the clock of its host; the agent saw it alive 2 ms before."""
    at = NOON + int(after_s * S)
    where = RunPosition(rank, step=batch, batch=batch, seq=batch)
    return [EventMessage(WorkerExit(where, code, by, "script", ended_ns=at, alive_ns=at - 2 * 10**6))]


def lost_its_peer(make, rank):
    return [make.raised(rank, "RuntimeError", "Connection closed by peer", peer=True), make.ended(rank, 1)]


def verdict_of(make, *nodes, announced=0, launch=False):
    """`nodes`: the ranks of each."""
    told = []
    for number, ranks in enumerate(nodes):
        hello = make.hello(f"a{number}", f"h{number}", announced or len(ranks), len(nodes))
        sent = [EventMessage(NodeSignal(15, NOON + S))] if launch else []
        bodies = [hello, *(body for rank in ranks for body in rank), *sent, NodeBye("failed")]
        told += [(f"a{number}", n, body) for n, body in enumerate(bodies)]
    return decide(fold(told))


def test_all_ranks_at_once_are_interrupted(make):
    verdict = verdict_of(make, [dies(rank, after_s=rank / 1000) for rank in range(4)])

    assert (verdict.kind, verdict.certainty, verdict.rank, verdict.signal) == (
        "interrupted",
        "supported",
        None,
        "SIGTERM",
    )
    assert verdict.statement == "SIGTERM from outside ended all 4 ranks, within 5 ms; no overflow had been seen."
    assert verdict.evidence[:2] == [
        "ranks 0, 1, 2 and 3 were ended by SIGTERM outside of a forward, after batch 4",
        "torchrun got no signal, and each of these ranks ended before torchrun stopped any",
    ]


def test_all_ranks_of_two_nodes(make):
    """Whose clocks are an hour apart."""
    verdict = verdict_of(make, [dies(0), dies(1)], [dies(2, after_s=3600), dies(3, after_s=3600)])

    assert verdict.statement.startswith("SIGTERM from outside ended all 4 ranks, within 2 ms on each node;")


def test_all_ranks_of_one_node_and_the_others_lost_them(make):
    others = [lost_its_peer(make, 2), dies(3, by="torchrun")]
    verdict = verdict_of(make, [dies(0, USR1), dies(1, USR1)], others)

    assert (verdict.kind, verdict.signal) == ("interrupted", "SIGUSR1")
    assert verdict.statement.startswith("SIGUSR1 from outside ended ranks 0 and 1, all of h0, within 2 ms;")
    assert [rank.rank for rank in verdict.cascade] == [2, 3]


@pytest.mark.parametrize(
    ("ranks", "announced"),
    [
        ([dies(0), dies(1, by="torchrun")], 2),
        ([dies(0), dies(1), dies(2, by="torchrun")], 3),
        ([dies(0), dies(1, USR1)], 2),
        ([dies(0, KILL), dies(1, KILL)], 2),
        ([dies(0), dies(1, after_s=3.0)], 2),
        ([dies(0), dies(1)], 4),
        ([dies(0)], 1),
        ([dies(0), dies(1, -signal.SIGSEGV)], 2),
    ],
    ids=[
        "one",
        "some of a node",
        "two signals",
        "SIGKILL, which the kernel sends for memory",
        "seconds apart",
        "others were not heard",
        "a single rank",
        "one crashed",
    ],
)
def test_else_a_rank_is_lost(make, ranks, announced):
    assert verdict_of(make, ranks, announced=announced).kind == "lost"


def test_the_launch_s_own_signal_is_told_as_before(make):
    verdict = verdict_of(make, [dies(0, by="torchrun"), dies(1, by="torchrun")], launch=True)

    assert (verdict.kind, verdict.certainty) == ("interrupted", "established")
