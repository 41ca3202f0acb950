"""A node whose records do not reach the collector, as its first rank tells in the preflight."""

from __future__ import annotations

import threading
import time

import pytest
from gpuwatch.core.identity import RankIdentity
from gpuwatch.core.recorder.run_folder import tell_answered, tell_unanswered, unanswered
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.preflight import course
from gpuwatch.worker.preflight.course import PreflightRun
from msgspec.structs import replace

THERE = "tcp://n0:29401"


def run(folder, local_rank=0):
    me = RankIdentity(4 + local_rank, local_rank, 8, 4, "localhost", 1, True)
    found = PreflightRun(me, WorkerSettings(str(folder)), lambda line: None, time.monotonic())
    found._parts.facts = replace(found._parts.facts, host="n1")
    return found


def test_one_that_was_answered_says_nothing(tmp_path):
    assert run(tmp_path)._unanswered() == []
    tell_unanswered(tmp_path, THERE)
    assert unanswered(tmp_path) == THERE
    tell_answered(tmp_path)
    tell_answered(tmp_path)
    assert run(tmp_path)._unanswered() == []


def test_one_that_is_not_answered_is_a_warning_of_its_first_rank_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "_ANSWER_S", 0.1)
    tell_unanswered(tmp_path, THERE)

    (found,) = run(tmp_path)._unanswered()
    assert (found.stage, found.grade, found.ranks, found.hosts) == ("arrive", "warn", [4], ["n1"])
    assert found.sentence == f"n1 gets no answer from gpuwatch's collector at {THERE}: the report will lack its ranks"
    assert run(tmp_path, local_rank=1)._unanswered() == []


def test_an_answer_that_comes_meanwhile_is_waited_for(tmp_path, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(course, "_ANSWER_S", 600.0)
    tell_unanswered(tmp_path, THERE)
    answers = threading.Thread(target=lambda: waits.wait(60) and tell_answered(tmp_path))
    answers.start()
    looks = iter(range(1_000_000))

    def sleep(seconds, real=time.sleep):
        if next(looks):
            waits.set()
        real(seconds)

    monkeypatch.setattr(course.time, "sleep", sleep)
    assert run(tmp_path)._unanswered() == []
    answers.join()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_without_an_agent_there_is_nothing_to_wait_for(tmp_path, local_rank):
    assert run(tmp_path / "gone", local_rank)._unanswered() == []
