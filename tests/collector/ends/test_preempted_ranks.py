"""Which scripts that leave with an exit code of their own were told to, by a signal."""

from __future__ import annotations

import signal

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.rank_standing import HeardSignal
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptError, ScriptExit
from gpuwatch.core.wire.messages import EventMessage, NodeBye

S = 10**9
NOON = 10**6 * S
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


def heard(number=TERM, *, before_s=3.2, batch=4, sender=77, from_launcher=False):
    """It came this long before noon."""
    came = NOON - int(before_s * S)
    if from_launcher:
        return HeardSignal(int(number), parent_ns=came)
    return HeardSignal(int(number), came, batch, sender)


def leaves(rank, *signals, code=7, handler=0, by="itself", batch=4):
    """By sys.exit, at noon."""
    where = RunPosition(rank, step=batch, batch=batch, seq=batch, time_ns=NOON)
    exit_ = WorkerExit(where, code, by, "finished", ended_ns=NOON, heard=list(signals))
    return [EventMessage(ScriptExit(where, code, handler=int(handler))), EventMessage(exit_)]


def dies(rank, code, *signals, by="itself"):
    where = RunPosition(rank, step=4, batch=4, seq=4)
    return [EventMessage(WorkerExit(where, code, by, "script", ended_ns=NOON, heard=list(signals)))]


def raises(rank, *signals, peer=True, error="RuntimeError", line="", handler=0, batch=4):
    """`line`: the script's own, which raised it."""
    where = RunPosition(rank, step=batch, batch=batch, seq=5, time_ns=NOON)
    traceback = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in main\n    {line}\n'
    error = ScriptError(where, error, "Connection closed by peer", traceback, None, peer, [], int(handler))
    exit_ = WorkerExit(where, 1, "itself", "raised", ended_ns=NOON, heard=list(signals))
    return [EventMessage(error), EventMessage(exit_)]


def verdict_of(make, *ranks, launch=0):
    told = [EventMessage(NodeSignal(launch, NOON + S))] if launch else []
    bodies = [make.hello(nproc=len(ranks)), *(body for rank in ranks for body in rank), *told, NodeBye("failed")]
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies)))


def test_ranks_that_were_told_to_end_are_interrupted(make):
    verdict = verdict_of(make, leaves(0, heard()), leaves(1, heard(before_s=0.05)))

    assert (verdict.kind, verdict.signal, verdict.rank, verdict.certainty) == (
        "interrupted",
        "SIGTERM",
        None,
        "supported",
    )
    assert verdict.statement == (
        "SIGTERM reached ranks 0 and 1 from outside, and their scripts ended with exit code 7, up to 3.2 s later; no "
        "overflow had been seen."
    )
    assert verdict.evidence == [
        "SIGTERM reached rank 0 from process 77, in batch 4; its script ended with exit code 7, 3.2 s later",
        "SIGTERM reached rank 1 from process 77, in batch 4; its script ended with exit code 7, 50 ms later",
        "torchrun got no signal: it was sent to the ranks",
    ]


def test_a_handler_that_ends_the_script_is_proof(make):
    verdict = verdict_of(make, leaves(0, heard(), handler=TERM), leaves(1, heard(), handler=TERM))

    assert (verdict.kind, verdict.certainty) == ("interrupted", "established")
    assert "its handler called sys.exit(7), 3.2 s later" in verdict.evidence[0]


def preempted(rank, *signals, **more):
    return raises(rank, *signals, peer=False, error="Preempted", **more)


def test_a_handler_that_raises_is_proof(make):
    verdict = verdict_of(make, preempted(0, heard(), handler=TERM), preempted(1, heard(before_s=0.05), handler=TERM))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("interrupted", "established", None)
    assert verdict.statement.startswith(
        "SIGTERM reached ranks 0 and 1 from outside, and their scripts raised Preempted, up to 3.2 s later"
    )
    assert verdict.evidence[1].endswith("in batch 4; its handler raised Preempted, 50 ms later")


def test_a_script_that_raises_soon_after_its_handler_was_told(make):
    verdict = verdict_of(make, *(preempted(rank, heard(batch=3), line="raise Preempted") for rank in range(2)))

    assert (verdict.kind, verdict.certainty) == ("interrupted", "supported")
    assert verdict.evidence[0].endswith("its script raised Preempted, 3.2 s later")


def test_an_exception_that_a_handler_raised_for_the_launch_s_signal(make):
    told = [preempted(rank, heard(from_launcher=True), handler=TERM) for rank in range(2)]
    verdict = verdict_of(make, *told, launch=15)

    assert (verdict.kind, verdict.certainty) == ("interrupted", "established")
    assert "Ranks 0 and 1 raised Preempted, up to 3.2 s after SIGTERM had reached them." in verdict.statement


@pytest.mark.parametrize(
    "ranks",
    [
        [preempted(0, line="raise Preempted"), preempted(1, line="raise Preempted")],
        [preempted(0, heard(batch=1), line="raise Preempted"), preempted(1, heard(batch=1), line="raise Preempted")],
        [preempted(0, heard(), line="torch.save(state)"), preempted(1, heard(), line="torch.save(state)")],
        [preempted(0, heard(), handler=signal.SIGALRM), preempted(1, heard(), handler=signal.SIGALRM)],
        [preempted(0, heard(), handler=TERM), raises(1, heard(), peer=False, line="raise ValueError")],
        [preempted(0, heard(), handler=TERM), preempted(1, line="raise Preempted")],
    ],
    ids=["no signal", "long after", "a failed save", "an alarm's handler", "another error", "one without a signal"],
)
def test_another_exception_is_a_crash(make, ranks):
    assert verdict_of(make, *ranks).kind == "crash"


def test_a_rank_that_alone_was_told_to_end_is_named(make):
    verdict = verdict_of(make, raises(0), leaves(1, heard()))

    assert (verdict.kind, verdict.rank, verdict.signal) == ("interrupted", 1, "SIGTERM")
    assert verdict.statement.startswith("SIGTERM reached rank 1 on ")
    assert [rank.rank for rank in verdict.cascade] == [0]


@pytest.mark.parametrize(
    "other",
    [
        dies(1, -TERM),
        dies(1, -TERM, by="torchrun"),
        dies(1, -9, heard(), by="torchrun"),
        leaves(1, heard(from_launcher=True), by="torchrun"),
        raises(1, heard()),
    ],
    ids=["at its default", "stopped", "saved for too long", "stopped and saved", "lost its peer"],
)
def test_what_the_others_do_then_is_the_same_interruption(make, other):
    assert verdict_of(make, leaves(0, heard()), other).kind == "interrupted"


@pytest.mark.parametrize(
    "ranks",
    [
        [leaves(0), leaves(1)],
        [leaves(0, heard(from_launcher=True)), leaves(1, heard(from_launcher=True))],
        [leaves(0, heard(before_s=2000)), leaves(1, heard(before_s=2000))],
        [leaves(0, heard(before_s=-5)), leaves(1, heard(before_s=-5))],
        [leaves(0, heard()), raises(1, heard(), peer=False)],
        [leaves(0, heard()), dies(1, -signal.SIGSEGV)],
        [leaves(0, heard()), dies(1, -signal.SIGKILL, heard())],
        [leaves(0, heard()), leaves(1)],
        [leaves(0, heard()), leaves(1, heard(INT))],
    ],
    ids=[
        "no signal",
        "torchrun's own",
        "long before",
        "after its end",
        "one raised in its save",
        "one crashed",
        "one was killed",
        "one left by itself",
        "two signals",
    ],
)
def test_another_reason_is_no_interruption(make, ranks):
    assert verdict_of(make, *ranks).kind in ("crash", "lost")


@pytest.mark.parametrize(
    ("number", "batches", "handler", "kind"),
    [
        (USR1, 1, 0, "interrupted"),
        (USR1, 40, 0, "crash"),
        (USR1, 40, USR1, "interrupted"),
        (TERM, 40, 0, "interrupted"),
    ],
)
def test_a_signal_with_other_uses_counts_where_the_script_left_soon(make, number, batches, handler, kind):
    told = heard(number, batch=4)
    ranks = [leaves(rank, told, handler=handler, batch=4 + batches) for rank in range(2)]
    assert verdict_of(make, *ranks).kind == kind


def test_of_two_signals_the_one_whose_handler_left_counts(make):
    two = heard(USR1, before_s=9), heard(TERM, before_s=1)
    assert verdict_of(make, leaves(0, *two, handler=USR1)).signal == "SIGUSR1"
    assert verdict_of(make, leaves(0, *two)).signal == "SIGTERM"


def test_a_rank_whose_agent_tells_its_end_has_left_then(make):
    """Below `gpuwatch run`, the script's own Python cannot tell its exit code, nor when."""
    where = RunPosition(0, step=4, batch=4)
    exit_ = WorkerExit(where, 7, "itself", "finished", ended_ns=NOON, heard=[heard()])
    verdict = verdict_of(make, [EventMessage(ScriptExit(where, 7)), EventMessage(exit_)])

    assert verdict.kind == "interrupted"
    assert "exit code 7, 3.2 s later" in verdict.statement


def test_how_long_the_saving_took_is_told_where_the_launch_got_the_signal(make):
    saved = [leaves(rank, heard(from_launcher=True), by="torchrun") for rank in range(2)]
    verdict = verdict_of(make, *saved, launch=15)

    assert (verdict.kind, verdict.certainty) == ("interrupted", "established")
    assert verdict.statement == (
        "The run was ended from outside by SIGTERM; no overflow had been seen. Ranks 0 and 1 ended with exit code 7, "
        "up to 3.2 s after SIGTERM had reached them."
    )
