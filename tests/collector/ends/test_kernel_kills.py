"""What is said of a rank where the kernel killed for lack of memory."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.ends.kernel_kills import memory_text
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptError
from gpuwatch.core.wire.messages import AgentBody, AgentHello, EventMessage, NodeBye

GIB = 1 << 30
HERE = RunPosition(0, batch=3, seq=4, time_ns=10**18)


def verdict_of(*bodies: AgentBody):
    hello = AgentHello("h0", "h0", 1, 1, 1, command=["gpuwatch"], versions={}, rdzv_id="job")
    return decide(fold([("h0", number, body) for number, body in enumerate([hello, *bodies, NodeBye("failed")], 1)]))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (
            (1, 2 * GIB, 2 * GIB),
            "its memory cgroup was out of memory (limit 2 GiB, used up to 2 GiB), and the kernel killed 1 ",
        ),
        ((3, 2 * GIB, 0), "the kernel killed 3 processes of its memory cgroup for lack of memory (limit 2 GiB)"),
        ((1, 0, 0), "that has no limit, so its host lacked memory"),
        ((1, 2 * GIB, GIB), "for lack of memory on its host; the cgroup had enough (limit 2 GiB, used up to 1 GiB)"),
    ],
)
def test_the_limit_is_blamed_only_where_it_was_reached(numbers, said):
    kills, limit, peak = numbers
    exit_ = WorkerExit(HERE, -9, "itself", "forward", memory_kills=kills, memory_limit=limit, memory_peak=peak)
    assert said in memory_text(exit_)
    assert memory_text(exit_) in verdict_of(EventMessage(exit_)).statement


def test_a_rank_that_a_signal_ended_is_told_with_what_it_had_in_memory():
    verdict = verdict_of(EventMessage(WorkerExit(HERE, -9, "itself", "forward", resident=3 * GIB)))
    assert "rank 0 had up to 3 GiB in memory" in verdict.evidence
    assert "for lack of memory" not in verdict.statement


@pytest.mark.parametrize(
    ("message", "is_told"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", True),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", True),
        ("boom", False),
    ],
)
def test_a_lost_worker_of_a_data_loader_is_told_with_what_the_kernel_did(message, is_told):
    exit_ = WorkerExit(HERE, 1, "itself", "raised", memory_kills=1, memory_limit=2 * GIB, memory_peak=2 * GIB)
    error = ScriptError(HERE, "RuntimeError", message, "Traceback")
    verdict = verdict_of(EventMessage(error), EventMessage(exit_))
    assert verdict.kind == "crash"
    assert any("its memory cgroup was out of memory" in line for line in verdict.evidence) == is_told
    assert ("Give the job more memory on h0" in verdict.next[0]) == is_told
