"""Where in a step a rank was, in words."""

from __future__ import annotations

import pytest
from gpuwatch.collector.facts.words import doing
from gpuwatch.core.events.agent_events import RankLook, WorkerExit
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.events.run_position import RunPosition

AT = RunPosition(1, batch=4)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("", "outside of a forward, after batch 4"),
        ("forward", "after the forward of batch 4"),
        ("backward", "after the backward of batch 4"),
        ("optimizer", "after the optimizer step of batch 4"),
    ],
)
def test_between_two_parts_of_a_batch(after, words):
    assert doing(WorkerExit(AT, -9, "itself", "script", after=after)) == words
    assert doing(RankLook(AT, 1, 60.0, "script", state="T", after=after)) == words


@pytest.mark.parametrize(
    ("state", "stack", "words"),
    [
        ("T", [], "in the backward of batch 4, or after it"),
        ("t", [], "in the backward of batch 4, or after it"),
        ("T", [StackLine("/torch/autograd/graph.py", 800, "_engine_run_backward", "")], "in the backward of batch 4"),
        ("S", [], "in the backward of batch 4, or after it"),
    ],
)
def test_a_stopped_rank_without_a_stack_may_have_ended_its_backward(state, stack, words):
    assert doing(RankLook(AT, 1, 60.0, "backward", state=state, stack=stack)) == words
