"""Ranks that rest while somebody looks on: when they are asked, and who is told to be waited for."""

from __future__ import annotations

import pytest
from gpuwatch.collector.ends.hang_model import BACKWARD
from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.views.resting_ranks import AGAIN_S, REST_S, RestingRanks
from gpuwatch.core.events.agent_events import RankLook
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.beat import NodeBeat, RankState, pack_list
from gpuwatch.core.wire.messages import AgentHello

IN_BACKWARD = [
    StackLine("/venv/torch/autograd/graph.py", 865, "_engine_run_backward", "return run_backward()"),
    StackLine("/home/me/train.py", 41, "main", "loss.backward()"),
]
IN_HOOK = [StackLine("/home/me/train.py", 9, "slow", "time.sleep(60)"), *IN_BACKWARD]


def look(rank, stack, still=REST_S + 2, phase="backward"):
    return RankLook(RunPosition(rank, batch=3), 0, still, phase, state="S", stack=stack)


def beat(*looks):
    states = [RankState(rank, rank, 0, 1000 + rank, "backward", 3, 3, 5) for rank in (0, 1)]
    return NodeBeat(states, {}, looks=pack_list([*looks]))


@pytest.fixture
def facts():
    folded = FactFold()
    folded.add("a", 0, AgentHello("a", "host", 2, 1, 1, ["train.py"], {}, "run"))
    folded.add("a", 1, beat())
    return folded.as_it_stands()


@pytest.fixture
def at_rest(picture):
    def seen(resting, still=REST_S + 2, time_s=100.0, **more):
        # as many begun, as with DDP's reduction in a backward: no count tells who waits
        ranks = [picture.rank(rank, still=still, phase="backward", **more) for rank in (0, 1)]
        resting.see(picture.view(ranks, time_s=time_s))

    return seen


def told(resting, facts, now, hook=IN_HOOK, **more):
    assert resting.begins(now)
    resting.on_message(beat(look(0, IN_BACKWARD), look(1, hook, **more)))
    resting.conclude(facts, now)
    return resting.found


def test_nobody_is_asked_before_all_have_rested(at_rest):
    resting = RestingRanks()
    assert not resting.begins(0.0), "no picture yet"
    at_rest(resting, still=REST_S - 1)
    assert not resting.begins(10.0) and not resting.asks(10.0)
    at_rest(resting)
    assert resting.asks(10.0) and resting.begins(10.0)
    assert resting.asks(10.5) and not resting.begins(10.5), "one round at a time"


def test_who_waits_for_whom_in_a_backwards_reduction(at_rest, facts):
    resting = RestingRanks()
    at_rest(resting)
    attempt, found = told(resting, facts, 10.0)
    assert (attempt, found.ranks) == (0, [1])
    assert f"{BACKWARD}, in which rank 0 has waited for {REST_S + 2:.0f} s" in found.statement
    assert "train.py:9 in slow" in found.statement
    assert not resting.asks(11.0)


def test_they_are_asked_again_as_long_as_they_rest(at_rest, facts):
    resting = RestingRanks()
    at_rest(resting)
    told(resting, facts, 10.0)
    at_rest(resting, still=20.0, time_s=101.0)
    assert not resting.begins(9.0 + AGAIN_S) and resting.begins(10.0 + AGAIN_S)
    assert resting.found is not None and not resting.asks(10.0 + AGAIN_S), "what was found is shown meanwhile"


def test_it_is_forgotten_once_a_rank_moves(at_rest, facts):
    resting = RestingRanks()
    at_rest(resting)
    told(resting, facts, 10.0)
    at_rest(resting, still=0.5, time_s=101.0)
    assert resting.found is None and not resting.begins(12.0)


def test_it_is_forgotten_while_nobody_looks_on(at_rest, facts):
    resting = RestingRanks()
    at_rest(resting)
    told(resting, facts, 10.0)
    at_rest(resting, time_s=160.0)
    assert resting.found is None and resting.begins(70.0)


def test_a_rank_that_has_moved_meanwhile_is_not_waited_for(at_rest, facts):
    resting = RestingRanks()
    at_rest(resting)
    assert told(resting, facts, 10.0, still=0.5) is None


def test_where_all_wait_nobody_is_named(at_rest, facts):
    resting = RestingRanks()
    at_rest(resting)
    assert told(resting, facts, 10.0, hook=IN_BACKWARD) is None


def test_nobody_is_asked_where_the_counts_tell_it(picture):
    resting = RestingRanks()
    ranks = [picture.rank(0, still=30.0, begun=41, waits=True), picture.rank(1, still=30.0, begun=40)]
    resting.see(picture.view(ranks))
    assert not resting.begins(10.0)
