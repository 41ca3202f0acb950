"""Whom a verdict names where ranks were ended from outside: by a library, or by a signal to the job.

From stacks as torch 2.13 and faulthandler leave them.
"""

from __future__ import annotations

import signal

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation, StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptError, ScriptExit
from gpuwatch.core.wire.messages import EventMessage, NodeBye
from msgspec.structs import replace

S = 10**9
NOON = 10**6 * S
TORCH = "/venv/lib/python3.11/site-packages/torch"

OWN = StackLine("/home/me/train.py", 12, "slow_eval", "time.sleep(40)")
LOOP = StackLine("/home/me/train.py", 30, "main", "loss.backward()")
NORM = StackLine("/home/me/train.py", 40, "main", "norm = weight.full_tensor()")
BARRIER = [
    StackLine(f"{TORCH}/distributed/distributed_c10d.py", 4700, "barrier", "work = group.barrier(opts=opts)"),
    LOOP,
]
BACKWARD = [StackLine(f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward", "return engine.run_backward("), LOOP]
GATHER = [
    StackLine(f"{TORCH}/_ops.py", 882, "redispatch", "return self._handle.redispatch_boxed(keyset)"),
    StackLine(f"{TORCH}/_library/autograd.py", 41, "forward_no_grad", "result = op.redispatch()"),
    StackLine(f"{TORCH}/distributed/_functional_collectives.py", 142, "wait_tensor", "return torch.ops._c10d()"),
    NORM,
]
FORWARD = [StackLine(f"{TORCH}/nn/modules/linear.py", 125, "forward", "return F.linear(input)"), LOOP]
WATCHDOG = [StackLine("/home/me/watch.py", 3, "watchdog", "os.abort()")]


def aborted(rank, main, *, stack=(), waited_s=600.0, batch=4, phase="backward", groups=()):
    """A thread has aborted it: `main` is the main thread's stack, `stack` that of the other one."""
    return end(rank, -6, "itself", batch, phase, list(stack), main, waited_s, groups)


def killed(rank, number, stack, *, waited_s=4.0, batch=4, phase="backward", groups=(), memory_kills=0):
    """Its main thread got the signal, in `stack`; [] if the signal leaves none."""
    return end(rank, -number, "itself", batch, phase, list(stack), [], waited_s, groups, memory_kills)


def stopped(rank, main, *, batch=3, phase="script", groups=()):
    """torchrun has, after it was asked."""
    return end(rank, -15, "torchrun", batch, phase, [], main, 300.0, groups)


def end(rank, code, by, batch, phase, stack, main, still_s, groups, memory_kills=0):
    where = RunPosition(rank, step=batch, batch=batch, seq=batch)
    times = {"ended_ns": NOON, "still_s": still_s, "memory_kills": memory_kills}
    return [
        EventMessage(
            WorkerExit(where, code, by, phase, groups=list(groups), stack=stack, main=main, state="S", **times)
        )
    ]


def lost_its_peer(rank, line):
    trace = (
        f'Traceback:\n  File "{line.file}", line {line.line}, in {line.function}\n    {line.text}\nRuntimeError: closed'
    )
    error = ScriptError(
        RunPosition(rank, batch=4, time_ns=NOON), "RuntimeError", "Connection closed", trace, None, True
    )
    return [EventMessage(error), *end(rank, 1, "itself", 4, "raised", [], [], 1.0, ())]


def left(rank):
    return end(rank, 0, "itself", 7, "finished", [], [], 1.0, ())


def verdict_of(make, *ranks, signal=0):
    told = [EventMessage(NodeSignal(signal, NOON + 5 * S))] if signal else []
    bodies = [make.hello(nproc=len(ranks)), *(body for rank in ranks for body in rank), *told, NodeBye("failed")]
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies)))


@pytest.mark.parametrize("stack", [[], WATCHDOG], ids=["a library's thread", "a thread of Python"])
@pytest.mark.parametrize(
    ("main", "operation"),
    [(BARRIER, "barrier"), (BACKWARD, "the backward's reduction of gradients"), (GATHER, "a functional collective")],
)
def test_who_was_waited_for_is_named_and_not_who_waited(make, main, operation, stack):
    verdict = verdict_of(make, aborted(0, main, stack=stack), stopped(1, [OWN]))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("hang", "supported", 1)
    assert verdict.statement == (
        "Rank 1 was at train.py:12 in slow_eval, after batch 3: time.sleep(40). "
        f"It never reached {operation}, in which rank 0 waited for 600 s, until SIGABRT ended it."
    )
    assert [one.rank for one in verdict.cascade] == [0]


def test_the_last_look_has_what_had_ended_last_in_the_batch(make):
    (told,) = stopped(1, [OWN])
    ended = [EventMessage(replace(told.event, after="optimizer"))]
    verdict = verdict_of(make, aborted(0, BARRIER), ended)

    assert "slow_eval, after the optimizer step of batch 3: time.sleep(40). " in verdict.statement


def test_several_that_waited_are_one_finding(make):
    verdict = verdict_of(make, aborted(0, BACKWARD), stopped(1, [OWN]), aborted(2, BACKWARD))

    assert verdict.rank == 1
    assert "in which ranks 0, 2 waited for 600 s, until SIGABRT ended them" in verdict.statement


def test_before_the_first_batch(make):
    main = [StackLine(f"{TORCH}/nn/parallel/distributed.py", 900, "__init__", "_verify_param_shape("), LOOP]
    verdict = verdict_of(make, aborted(0, main, batch=-1, phase="script"), stopped(1, [OWN], batch=-1))

    assert (verdict.kind, verdict.rank) == ("hang", 1)
    assert "DDP's own collective" in verdict.statement


def test_one_that_is_ahead_is_not_who_was_waited_for(make):
    verdict = verdict_of(make, aborted(0, BACKWARD, batch=4), stopped(1, [OWN], batch=5))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("lost", "unknown", None)


def test_what_was_aborted_at_once_had_not_waited(make):
    verdict = verdict_of(make, aborted(0, BARRIER, waited_s=0.1), stopped(1, [OWN]))

    assert (verdict.certainty, verdict.rank) == ("unknown", None)


def test_ranks_in_different_collectives_are_both_shown(make):
    """gloo aborts the one that was sent another size than it expects. The other one then loses its peer."""
    verdict = verdict_of(make, aborted(0, GATHER, waited_s=0.0), lost_its_peer(1, LOOP))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("crash", "unknown", None)
    assert "rank 0 at train.py:40 in main: norm = weight.full_tensor()" in verdict.statement
    assert "rank 1 at train.py:30 in main: loss.backward()" in verdict.statement
    assert verdict.cascade == []


def test_at_the_same_line_nobody_is_named(make):
    verdict = verdict_of(make, aborted(0, BACKWARD, waited_s=0.0), lost_its_peer(1, LOOP))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("lost", "unknown", None)


def test_one_that_left_is_named_beside_two_that_waited(make):
    verdict = verdict_of(make, aborted(0, BARRIER), left(1), aborted(2, BARRIER))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("hang", "supported", 1)


def test_of_two_the_other_one_may_have_issued_one_too_many(make):
    verdict = verdict_of(make, aborted(0, BARRIER), left(1))

    assert verdict.rank is None
    assert sorted(one.rank for one in verdict.concurrent) == [0, 1]
    assert "Or rank 0 has issued one collective too many, at train.py:30 in main" in verdict.statement


@pytest.mark.parametrize("stack", [WATCHDOG, [*FORWARD]])
def test_a_main_thread_that_was_at_work_has_not_waited(make, stack):
    """The rank has aborted itself, or a thread of its own has: then it is not certain."""
    main = [] if stack == FORWARD else FORWARD
    verdict = verdict_of(make, aborted(0, main, stack=stack), stopped(1, BARRIER))

    assert (verdict.kind, verdict.rank) == ("lost", 0)
    assert verdict.certainty == ("supported" if main else "established")


def test_a_reason_of_another_ranks_own_comes_first(make):
    error = ScriptError(RunPosition(1, batch=4, time_ns=NOON), "ValueError", "boom", "Traceback", None, False)
    raised = [EventMessage(error), *end(1, 1, "itself", 4, "raised", [], [], 1.0, ())]
    verdict = verdict_of(make, aborted(0, BACKWARD), raised)

    assert (verdict.kind, verdict.rank) == ("crash", 1)


def test_the_table_of_a_rank_counts_as_well(make):
    """It stands in a collective that its stack does not show."""
    group = GroupState("0", "0-1", 2, begun=9, at=9, phase="waiting")
    behind = GroupState("0", "0-1", 2, begun=8, at=8, phase="none")
    verdict = verdict_of(make, aborted(0, FORWARD, groups=[group]), stopped(1, [OWN], groups=[behind]))

    assert verdict.rank in (1, None)
    assert verdict.certainty != "established"


WAITS = GroupState("0", "0-1", 2, 9, 8, "waiting", 9, recent=[IssuedOperation(9, "all_reduce", "float32", 3)])
BEHIND = GroupState("0", "0-1", 2, begun=8, ended=8, at=8)
FAULTS = [signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP]


@pytest.mark.parametrize("number", [*FAULTS, signal.SIGABRT])
@pytest.mark.parametrize("stack", [[], BARRIER], ids=["no stack", "a stack"])
def test_by_whatever_fault_a_library_ends_a_rank_who_was_waited_for_is_named(make, number, stack):
    one = killed(0, number, stack, groups=[WAITS])
    verdict = verdict_of(make, one, stopped(1, [OWN], batch=4, groups=[BEHIND]))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("hang", "supported", 1)
    where, name = "barrier" if stack else "all_reduce", signal.Signals(number).name
    assert verdict.statement.endswith(
        f"It never reached {where}, in which rank 0 waited for 4 s, until {name} ended it."
    )
    assert (verdict.signal, [one.rank for one in verdict.cascade]) == (name, [0])


@pytest.mark.parametrize("batch", [3, 4], ids=["a batch behind", "in the same batch"])
@pytest.mark.parametrize(
    ("number", "waited_s", "expected"),
    [
        (signal.SIGSEGV, 0.1, ("lost", "supported", 0)),
        (signal.SIGSEGV, 4.0, ("lost", "unknown", None)),
        (signal.SIGSEGV, 12.0, ("hang", "supported", 1)),
        (signal.SIGABRT, 4.0, ("hang", "supported", 1)),
    ],
)
def test_a_fault_in_a_backward_may_be_the_ranks_own(make, number, waited_s, expected, batch):
    """No table shows that it waits there. It may compute, unless it has stood for long."""
    verdict = verdict_of(make, killed(0, number, BACKWARD, waited_s=waited_s), stopped(1, [OWN], batch=batch))

    assert (verdict.kind, verdict.certainty, verdict.rank) == expected


@pytest.mark.parametrize("batch", [3, 4, 5])
@pytest.mark.parametrize("number", FAULTS[:2])
def test_a_fault_in_code_of_its_own_is_established_wherever_the_others_are(make, number, batch):
    verdict = verdict_of(make, killed(0, number, FORWARD, phase="forward"), stopped(1, BARRIER, batch=batch))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("lost", "established", 0)


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_of_a_rank_that_was_last_is_established(make, number):
    """The others are ahead: it has waited for nobody, wherever it was."""
    one = killed(0, number, [] if number == signal.SIGTRAP else BARRIER, groups=[BEHIND])
    verdict = verdict_of(make, one, stopped(1, BARRIER, batch=5, groups=[WAITS]))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("lost", "established", 0)


@pytest.mark.parametrize(("memory_kills", "certainty"), [(0, "supported"), (1, "established")])
def test_a_kill_from_outside_of_a_rank_that_waited_is_told_as_that(make, memory_kills, certainty):
    """The kernel's own record of a lack of memory is a reason."""
    one = killed(0, signal.SIGKILL, [], groups=[WAITS], memory_kills=memory_kills)
    verdict = verdict_of(make, one, stopped(1, [OWN], batch=4, groups=[BEHIND]))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("lost", certainty, 0)
    told = "it seems to have waited for rank 1, which had got less far" in verdict.evidence
    assert told == (memory_kills == 0)


@pytest.mark.parametrize(
    ("thread", "expected"),
    [
        ([], ("hang", "supported", 1)),
        ([StackLine("libnccl.so.2", 0, "ncclCommAbort")], ("hang", "supported", 1)),
        ([StackLine("/home/me/prefetch.py", 3, "read", "ctypes.string_at(0)")], ("lost", "supported", 0)),
    ],
    ids=["a library's thread", "the same on Python 3.14", "a thread of the script's"],
)
def test_a_fault_of_a_thread_beside_one_that_waits(make, thread, expected):
    one = end(0, -signal.SIGSEGV, "itself", 4, "backward", thread, BARRIER, 4.0, [WAITS])
    verdict = verdict_of(make, one, stopped(1, [OWN], batch=4, groups=[BEHIND]))

    assert (verdict.kind, verdict.certainty, verdict.rank) == expected


def test_a_rank_outside_of_the_group_was_not_waited_for(make):
    pair = [replace(WAITS, size=2)]
    one = killed(0, signal.SIGSEGV, BARRIER, groups=pair)
    others = (stopped(rank, [OWN], batch=4, groups=[BEHIND] if rank == 1 else []) for rank in (1, 2))
    verdict = verdict_of(make, one, *others)

    assert (verdict.kind, verdict.rank, verdict.concurrent) == ("hang", 1, [])


def test_a_host_that_synchronizes_with_its_device_waits_for_a_collective(make):
    stack = [StackLine("/home/me/train.py", 44, "step", "loss.item()")]
    verdict = verdict_of(make, aborted(0, stack), stopped(1, [OWN]))

    place = "the collective that its device is in (the host waits at train.py:44 in step: loss.item())"
    assert f"It never reached {place}, in which rank 0 waited for 600 s" in verdict.statement


def test_a_job_that_is_ended_tells_for_whom_it_had_stood_still(make):
    waits, away = (
        end(0, -15, "torchrun", 4, "backward", [], BACKWARD, 90.0, ()),
        end(1, -15, "torchrun", 3, "script", [], [OWN], 97.0, ()),
    )
    verdict = verdict_of(make, waits, away, signal=15)

    assert (verdict.kind, verdict.rank) == ("interrupted", None)
    assert verdict.statement == (
        "The run was ended from outside by SIGTERM; no overflow had been seen. It had stood still for 90 s. Rank 1 "
        "was at train.py:12 in slow_eval, after batch 3: time.sleep(40). "
        "It never reached the backward's reduction of gradients, in which rank 0 waited for 90 s."
    )
    assert verdict.next == ["Look at what rank 1 did then."]


def test_a_rank_that_ctrl_c_has_reached_shows_where_it_was(make):
    trace = f'Traceback:\n  File "{OWN.file}", line {OWN.line}, in {OWN.function}\n    {OWN.text}\nKeyboardInterrupt'
    error = ScriptError(RunPosition(1, batch=3, time_ns=NOON), "KeyboardInterrupt", "", trace, None, False)
    away = [EventMessage(error), *end(1, 1, "torchrun", 3, "raised", [], [], 0.0, ())]
    waits = end(0, -2, "torchrun", 4, "backward", [], BACKWARD, 90.0, ())
    verdict = verdict_of(make, waits, away, signal=2)

    assert verdict.kind == "interrupted"
    assert "It had stood still for 90 s. Rank 1 was at train.py:12 in slow_eval, after" in verdict.statement
    assert "at train.py:12 in slow_eval" in verdict.statement


@pytest.mark.parametrize("still_s", [0.0, 3.0])
def test_a_job_that_had_just_moved_had_not_stood_still(make, still_s):
    ranks = [end(rank, -15, "torchrun", 4, "backward", [], BACKWARD, still_s, ()) for rank in range(2)]
    assert "stood still" not in verdict_of(make, *ranks, signal=15).statement


@pytest.mark.parametrize("by", ["itself", "torchrun"])
def test_a_script_that_saves_and_leaves_after_a_signal_is_interrupted(make, by):
    def saved(rank):
        left = ScriptExit(RunPosition(rank, batch=4, time_ns=NOON), 7)
        return [EventMessage(left), *end(rank, 7, by, 4, "finished", [], [], 0.0, ())]

    verdict = verdict_of(make, saved(0), saved(1), signal=15)
    assert (verdict.kind, verdict.signal) == ("interrupted", "SIGTERM")
    assert "ranks 0 and 1 ended with exit code 7" in verdict.evidence
    assert verdict_of(make, saved(0), saved(1)).kind == "crash", "without a signal"


def test_ranks_that_raise_the_same_by_themselves_are_one_finding(make):
    """Rank 1 has begun one collective more, for which it does not wait."""

    def raises(rank, seq):
        where = RunPosition(rank, batch=2, seq=seq, clock={"0": seq}, time_ns=NOON + rank)
        error = ScriptError(where, "ValueError", f"empty shard {rank}", "Traceback", None, False)
        return [EventMessage(error), *end(rank, 1, "itself", 2, "raised", [], [], 0.0, ())]

    verdict = verdict_of(make, raises(0, 8), raises(1, 9))
    assert (verdict.kind, verdict.certainty) == ("crash", "supported")
    assert verdict.statement.startswith("Rank 0 (and rank 1) on ")
    assert verdict.cascade == []


IN_INIT = (
    'Traceback:\n  File "/home/me/train.py", line 9, in main\n    dist.init_process_group()\n'
    f'  File "{TORCH}/distributed/distributed_c10d.py", line 1710, in init_process_group\n    store = rendezvous()\n'
)


def gave_up(rank, *, peer=True):
    error = ScriptError(RunPosition(rank, time_ns=NOON), "DistStoreError", "Timed out", IN_INIT, None, peer)
    return [EventMessage(error), *end(rank, 1, "itself", -1, "raised", [], [], 0.0, ())]


def test_a_rank_that_did_not_come_to_init_is_named(make):
    verdict = verdict_of(make, gave_up(0), stopped(1, [OWN], batch=-1), gave_up(2))

    assert (verdict.kind, verdict.certainty, verdict.rank) == ("hang", "supported", 1)
    assert verdict.statement == (
        "Rank 1 was at train.py:12 in slow_eval, before its first batch: time.sleep(40). "
        "It never reached init_process_group, in which ranks 0, 2 waited until their time was over."
    )


@pytest.mark.parametrize(
    "other",
    [
        stopped(1, [], batch=-1),
        stopped(1, [StackLine(f"{TORCH}/distributed/distributed_c10d.py", 1710, "init_process_group"), OWN], batch=-1),
        stopped(1, [OWN], batch=3),
    ],
    ids=["without a stack", "in it as well", "past it"],
)
def test_who_was_not_seen_elsewhere_before_it_is_not_named_for_init(make, other):
    assert verdict_of(make, gave_up(0), other).rank is None
