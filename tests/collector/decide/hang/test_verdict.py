"""The verdict of a job that stood still to its end, from the messages of its agents."""

from __future__ import annotations

import signal

import pytest
from gpuwatch.collector.decide.verdict import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.records import NodeSignal, RankLook, ScriptError, StackLine, Where, WorkerExit
from gpuwatch.core.wire.messages import Bye, EventMessage

IN_ALL_REDUCE = [
    StackLine("/torch/distributed/distributed_c10d.py", 3007, "all_reduce", "work.wait()"),
    StackLine("/home/me/train.py", 41, "step", "dist.all_reduce(loss)"),
]
LOADING = [StackLine("/home/me/data.py", 7, "load", "time.sleep(1)")]


def look(rank, stack, *, number=1, seq=9):
    return RankLook(Where(rank, step=4, batch=4, seq=seq), number, 300.0, "script", state="S", stack=stack)


def exited(rank, code=-15, by="torchrun", *, step=4, seq=9):
    return WorkerExit(Where(rank, step=step, batch=4, seq=seq), code, by, "script")


LOOKS = (look(0, IN_ALL_REDUCE), look(1, LOADING), look(2, IN_ALL_REDUCE))
ENDED = (exited(0), exited(1), exited(2))


@pytest.fixture
def verdict_of(make):
    def verdict(*events, outcome="failed"):
        bodies = [make.hello("a", "h", 3, 1), *map(EventMessage, events), Bye(outcome)]
        return decide(fold(("a", n, body) for n, body in enumerate(bodies, 1)))

    return verdict


def test_a_job_that_was_ended_while_it_stood_still(verdict_of):
    verdict = verdict_of(*LOOKS, *ENDED)

    assert (verdict.kind, verdict.rank, verdict.certainty, verdict.host, verdict.batch) == (
        "hang",
        1,
        "established",
        "h",
        4,
    )
    assert "data.py:7 in load" in verdict.statement
    assert {entry.rank for entry in verdict.cascade} == {0, 2}


def test_a_signal_that_ended_it_is_not_the_reason(verdict_of):
    assert verdict_of(*LOOKS, NodeSignal(signal.SIGINT), *ENDED, outcome="signal").kind == "hang"


def test_a_rank_that_has_moved_since_ends_the_stall(verdict_of):
    ended = (exited(0), exited(1, step=5), exited(2))
    assert verdict_of(*LOOKS, NodeSignal(signal.SIGINT), *ended, outcome="signal").kind == "interrupted"


def test_a_stall_that_passed_leaves_a_run_that_went_well_alone(verdict_of):
    done = [exited(rank, 0, "itself") for rank in range(3)]
    assert verdict_of(*LOOKS, *done, outcome="ok").kind != "hang"


def test_the_last_time_of_asking_counts(verdict_of):
    later = (look(0, LOADING, number=2), look(1, IN_ALL_REDUCE, number=2), look(2, IN_ALL_REDUCE, number=2))
    assert verdict_of(*LOOKS, *later, *ENDED).rank == 0


def test_the_timeout_of_those_that_waited_is_not_the_reason(verdict_of):
    errors = [
        ScriptError(Where(rank, step=4, batch=4, seq=9), "RuntimeError", "Timed out waiting 1800000ms", "", None, True)
        for rank in (0, 2)
    ]
    assert verdict_of(*LOOKS, *errors, exited(0, 1, "itself"), exited(1), exited(2, 1, "itself")).rank == 1


def test_the_watchdog_that_aborted_those_that_waited_is_not_the_reason(verdict_of):
    verdict = verdict_of(*LOOKS, exited(0, -signal.SIGABRT, "itself"), exited(1), exited(2))
    assert (verdict.kind, verdict.rank) == ("hang", 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raised_for_itself_in_the_end_is_the_reason(verdict_of, rank):
    error = ScriptError(Where(rank, step=4, batch=4, seq=9), "OSError", "stale file handle", "", None, False)
    others = [exited(other) for other in range(3) if other != rank]
    verdict = verdict_of(*LOOKS, error, exited(rank, 1, "itself"), *others)

    assert (verdict.kind, verdict.rank) == ("crash", rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_killed_in_the_end_is_the_reason(verdict_of, rank):
    others = [exited(other) for other in range(3) if other != rank]
    verdict = verdict_of(*LOOKS, exited(rank, -signal.SIGKILL, "itself"), *others)

    assert (verdict.kind, verdict.rank) == ("lost", rank)


def test_a_rank_that_had_left_before_the_others_were_asked(verdict_of):
    verdict = verdict_of(LOOKS[0], LOOKS[2], exited(1, 0, "itself"), exited(0), exited(2))

    assert (verdict.kind, verdict.rank) == ("hang", 1)
    assert "left early" in verdict.statement
