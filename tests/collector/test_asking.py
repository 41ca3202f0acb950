"""Whose answer a round waits for."""

from __future__ import annotations

import pytest
from gpuwatch.collector.asking import ANSWER_S, AskedAll
from gpuwatch.core.events.agent_events import RankLook, RankStall, WorkerExit
from gpuwatch.core.events.run_position import RunPosition


@pytest.mark.parametrize(
    ("by", "is_over"), [("itself", True), ("torchrun", True), ("unknown", True), ("running", False)]
)
def test_a_rank_that_ran_on_has_not_ended(by, is_over):
    """Its agent is gone, so it never answers: the round ends with its time, and without a word on that rank."""
    asked = AskedAll()
    number = asked.on_message(RankStall(RunPosition(0, batch=4), 300.0), 10.0)
    asked.on_message(WorkerExit(RunPosition(1, batch=4), None, by, "script"), 10.0)
    asked.on_message(RankLook(RunPosition(0, batch=4), number, 300.0, "script", state="S"), 10.0)

    asked.conclude(2, 10.0, "report", {})
    assert asked.is_open != is_over
    asked.conclude(2, 10.0 + ANSWER_S, "report", {})
    assert not asked.is_open
