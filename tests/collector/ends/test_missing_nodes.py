"""A job whose nodes have not all come: what it says meanwhile, and at its end."""

from __future__ import annotations

from datetime import datetime

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import FactFold, fold
from gpuwatch.collector.waiting_lines import EVERY_S, FIRST_S, OWN_FILES, ClockLines, WaitingLines
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.wire.messages import EventMessage, NodeBye


def folded(make, *hellos, ranks=()):
    found = FactFold(lambda agent, n: None, lambda agent, n: None)
    for hello in hellos:
        found.add(hello.agent, 1, hello)
    for rank in ranks:
        found.add(hellos[0].agent, 2, make.NodeBeat([make.state(rank)], {}))
    return found


def test_who_is_missing_is_said_after_a_while_and_then_every_minute(make):
    lines = WaitingLines(folded(make, make.hello("a0", "n0", nodes=2)), 1000)

    assert list(lines.due(100.0, 0)) == list(lines.due(100.0 + FIRST_S - 1, 0)) == []
    (first,) = lines.due(100.0 + FIRST_S, 0)
    assert first == "waiting for 1 of 2 nodes; heard from n0, for 20 s [GW610]"
    assert list(lines.due(100.0 + FIRST_S + EVERY_S - 1, 0)) == []
    (second,) = lines.due(100.0 + FIRST_S + EVERY_S, 3)
    assert "for 80 s; 3 connections with another key were refused: compare --rdzv-id and the secrets" in second


@pytest.mark.parametrize("ranks", [(), (0,)])
def test_nothing_is_said_once_all_have_come_or_a_rank_runs(make, ranks):
    hellos = [make.hello(f"a{node}", f"n{node}", nodes=2) for node in range(1 if ranks else 2)]
    lines = WaitingLines(folded(make, *hellos, ranks=ranks), 1000)

    assert not any(line for second in range(0, 300, 10) for line in lines.due(float(second), 0))


@pytest.mark.parametrize(
    ("more", "words"),
    [({"nodes": 3}, "n0 with --nnodes 2 and n1 with --nnodes 3"), ({"nproc": 4}, "n0 with --nproc-per-node 2 and n1")],
)
def test_nodes_that_were_started_differently_are_told_at_once_and_once(make, more, words):
    one, other = make.hello("a0", "n0", nodes=2), make.hello("a1", "n1", **{"nodes": 2, **more})
    lines = WaitingLines(folded(make, one, other), 1000)

    (told,) = lines.due(0.0, 0)
    assert words in told
    assert list(lines.due(1.0, 0)) == []


def test_the_verdict_has_it_too(make):
    bodies = [make.hello("a0", "n0", nodes=2), EventMessage(NodeSignal(2, 10**18)), NodeBye("signal", 2)]
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies)))

    assert verdict.statement == (
        "The run was ended from outside by SIGINT; no overflow had been seen. It waited for 1 of 2 nodes; "
        "heard from n0."
    )
    assert "were started with the same --rdzv-endpoint" in verdict.next[0]


def test_a_rendezvous_that_gave_up_names_who_was_heard(make):
    bye = NodeBye("failed", error="RendezvousTimeoutError: no one came")
    bodies = [make.hello("a0", "n0", nodes=2), bye]
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies)))

    assert "It waited for 1 of 2 nodes; heard from n0." in verdict.statement
    assert "the head node's ports can be reached" in verdict.next[0]


def test_a_limit_of_open_files_that_is_too_low_for_the_job_is_told_once(make):
    hello = make.hello("a0", "n0", nodes=512)
    (told,) = (line for line in WaitingLines(folded(make, hello), 512 + OWN_FILES - 1).due(0.0, 0))
    assert "may open 575 files, and a job of 512 nodes needs 576" in told
    enough = WaitingLines(folded(make, hello), 512 + OWN_FILES)
    assert list(enough.due(0.0, 0)) == []


@pytest.mark.parametrize(("offset_s", "words"), [(-75.0, "+75 s"), (75.0, "-75 s"), (-50.0, None), (None, None)])
def test_a_clock_that_is_a_minute_off_is_told_once_with_both_times(make, offset_s, words):
    found = folded(make, make.hello("a0", "n0", nodes=2))
    offset = round(offset_s * 1e9) if offset_s is not None else None
    found.add("a0", 0, make.NodeBeat([], {}, clock_offset_ns=offset, clock_round_trip_ns=1000))
    lines = ClockLines(found)
    told = list(lines.due(NOON))

    assert [words in line for line in told] == ([True] if words else [])
    if words == "+75 s":
        assert "the clock of n0 is +75 s off this host's (12:01:15 there, 12:00:00 here)" in told[0]
    assert list(lines.due(NOON)) == []


NOON = datetime(2026, 11, 28, 12, 0, 0)
