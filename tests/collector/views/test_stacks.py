"""A round in which viewers ask for the ranks' stacks, over a real socket and as decisions of time alone."""

from __future__ import annotations

import itertools

import pytest
from gpuwatch.collector.views.publisher import EVERY_S, ViewPublisher, stacks_viewer
from gpuwatch.collector.views.snapshot import StacksRound, view_text
from gpuwatch.core.events.agent_events import RankLook
from gpuwatch.core.events.rank_standing import StackLine, ThreadSeen
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder.stalls import ANSWER_S
from gpuwatch.core.wire.beat import NodeBeat, RankState, pack_list
from gpuwatch.core.wire.view import StacksView
from msgspec.structs import replace

from .test_publisher import KEYS, context, door, publisher  # noqa: F401  fixtures

REDUCE = [
    StackLine("/venv/torch/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()"),
    StackLine("/home/me/train.py", 41, "main", "dist.all_reduce(loss)"),
]
OWN = [StackLine("/home/me/train.py", 20, "forward", "time.sleep(60)")]


def state(rank: int, attempt: int = 0) -> RankState:
    return RankState(rank, rank, attempt, 1000 + rank, "script", 0, 3, 5)


def look(rank: int, stack=REDUCE, phase: str = "script", attempt: int = 0) -> RankLook:
    return RankLook(RunPosition(rank, attempt, batch=3), 0, 4.0, phase, state="S", stack=stack)


def beat(*looks: RankLook, ranks=(0, 1)) -> NodeBeat:
    return NodeBeat([state(rank) for rank in ranks], {}, looks=pack_list([*looks]))


def test_a_round_ends_when_every_running_rank_was_looked_at():
    stacks = StacksRound()
    assert stacks.begins(10.0)
    assert not stacks.begins(10.1), "one at a time"
    stacks.on_message(beat(look(1)))
    assert stacks.conclude({0, 1}, 10.2) is None
    stacks.on_message(beat(look(0)))
    assert [found.where.rank for found in stacks.conclude({0, 1}, 10.3)] == [0, 1]
    assert stacks.begins(10.4), "the next one"


def test_a_rank_that_nobody_looked_at_is_waited_for_a_while_only():
    stacks = StacksRound()
    stacks.begins(10.0)
    stacks.on_message(beat(look(1)))
    assert stacks.conclude({0, 1}, 10.0 + ANSWER_S - 0.1) is None
    assert [found.where.rank for found in stacks.conclude({0, 1}, 10.0 + ANSWER_S)] == [1]


def test_a_look_that_comes_outside_of_a_round_or_is_of_another_nodes_rank_does_not_count():
    stacks = StacksRound()
    stacks.on_message(beat(look(0)))
    stacks.begins(10.0)
    stacks.on_message(beat(look(2), look(1, attempt=7)))
    stacks.on_message(NodeBeat([state(0)], {}, looks=b"no list of looks"))
    assert stacks.conclude(set(), 10.1) == []


def test_control_characters_of_a_stack_do_not_reach_the_terminal():
    stacks = StacksRound()
    stacks.begins(10.0)
    stacks.on_message(beat(look(0, [StackLine("/home/me/train.py", 1, "main", "\x1b[2Jx()")])))
    (found,) = stacks.conclude({0}, 10.1)
    assert "\x1b" not in "\n".join(view_text(StacksView(0, "r", 1, {0: "a"}, [found])))


def test_ranks_that_stand_at_the_same_place_share_a_line_and_a_stack():
    unanswered = RankLook(RunPosition(3, batch=3), 0, 4.0, "script", state="D", threads=[ThreadSeen("pt_main", "D")])
    looks = [look(0), look(1), look(2, OWN, "forward"), unanswered]
    moving = replace(look(2, OWN, "optimizer"), moved=True)
    assert "  - rank 2 is moving: train.py:20 in forward: time.sleep(60)" in [
        *view_text(StacksView(0, "day", 3, {}, [moving]))
    ]
    lines = list(view_text(StacksView(0, "night", 5, dict.fromkeys(range(5), "gpu-1"), looks)))
    assert lines[0] == "run night: 5 running ranks of 5"
    assert "  - ranks 0, 1 wait in all_reduce: train.py:41 in main: dist.all_reduce(loss)" in lines
    assert "  - rank 2 is in the forward of batch 3: train.py:20 in forward: time.sleep(60)" in lines
    assert any(line.startswith("  - rank 3 ") and line.endswith("no stack could be read") for line in lines)
    assert "  - rank 4: no answer from the node within 8 s" in lines
    assert sum(line.startswith("Stack of ranks 0, 1,") for line in lines) == 1


@pytest.mark.usefixtures("context", "door")
def test_each_request_is_answered_once_under_its_own_topic(publisher: ViewPublisher, tmp_path):  # noqa: F811
    one, other = stacks_viewer(tmp_path), stacks_viewer(tmp_path)
    try:
        for turn in itertools.count():  # until the collector's end has heard both
            publisher.show(lambda: pytest.fail("a picture was made"), turn * EVERY_S)
            assert one.newest(0.01) is other.newest(0.01) is None
            if len(publisher.topics) == 2:
                break
        view = StacksView(7, "night", 1, {0: "gpu-1"}, [look(0)])
        publisher.answer(view)
        assert publisher.topics == []
        assert not publisher.has_viewers
        for link in (one, other):
            found = link.newest(60)
            assert found == view
            assert link.newest(0.05) is None
    finally:
        one.close()
        other.close()
    assert KEYS.viewer.private
