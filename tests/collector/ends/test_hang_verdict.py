"""The verdict of a job that stood still to its end, from the messages of its agents."""

from __future__ import annotations

import signal

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.agent_events import RankLook, WorkerExit
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation, StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptError, ScriptExit
from gpuwatch.core.wire.messages import EventMessage, NodeBye
from msgspec.structs import replace

IN_ALL_REDUCE = [
    StackLine("/torch/distributed/distributed_c10d.py", 3007, "all_reduce", "work.wait()"),
    StackLine("/home/me/train.py", 41, "step", "dist.all_reduce(loss)"),
]
LOADING = [StackLine("/home/me/data.py", 7, "load", "time.sleep(1)")]


def look(rank, stack, *, number=1, seq=9, still_s=300.0):
    return RankLook(RunPosition(rank, step=4, batch=4, seq=seq), number, still_s, "script", state="S", stack=stack)


def exited(rank, code=-15, by="torchrun", *, step=4, seq=9):
    return WorkerExit(RunPosition(rank, step=step, batch=4, seq=seq), code, by, "script")


LOOKS = (look(0, IN_ALL_REDUCE), look(1, LOADING), look(2, IN_ALL_REDUCE))
ENDED = (exited(0), exited(1), exited(2))


@pytest.fixture
def verdict_of(make):
    def verdict(*events, outcome="failed", ranks=3):
        bodies = [make.hello("a", "h", ranks, 1), *map(EventMessage, events), NodeBye(outcome)]
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


def stands_in_forward(rank, batch=4, module="net.block"):
    where = RunPosition(rank, step=4, batch=batch, root="Net", seq=9)
    return RankLook(where, 1, 300.0, "forward", module, "Block", state="S", stack=LOADING)


def test_where_the_rank_stood_is_in_the_fields_as_of_any_other_verdict(verdict_of):
    verdict = verdict_of(look(0, IN_ALL_REDUCE), stands_in_forward(1), look(2, IN_ALL_REDUCE), *ENDED)

    at = verdict.phase, verdict.root, verdict.module, verdict.cls, verdict.step, verdict.batch
    assert at == ("forward", "Net", "net.block", "Block", 4, 4)


def test_of_several_ranks_what_they_share_is_in_the_fields(verdict_of):
    several = (look(0, IN_ALL_REDUCE), stands_in_forward(1), stands_in_forward(2, module="head"))
    verdict = verdict_of(*several, *ENDED)

    assert (verdict.rank, [each.rank for each in verdict.concurrent]) == (None, [1, 2])
    assert (verdict.phase, verdict.module, verdict.step, verdict.batch) == ("forward", None, 4, 4)


def test_a_signal_that_ended_it_is_not_the_reason(verdict_of):
    assert verdict_of(*LOOKS, NodeSignal(signal.SIGINT), *ENDED, outcome="signal").kind == "hang"


@pytest.mark.parametrize(("still_s", "kind"), [(0.4, "interrupted"), (300.0, "hang")])
def test_a_signal_while_the_ranks_were_asked_leaves_no_hang_of_those_that_had_just_moved(verdict_of, still_s, kind):
    """Ranks 1 and 2 had no time to answer."""
    asked = look(0, IN_ALL_REDUCE, still_s=still_s)
    assert verdict_of(asked, NodeSignal(signal.SIGTERM), *ENDED, outcome="signal").kind == kind


def test_ctrl_c_reaches_the_ranks_and_is_no_reason_of_theirs(verdict_of):
    """In a terminal it does; one rank dies of it, another raises it."""
    raised = [ScriptError(exited(rank).where, "KeyboardInterrupt", "", "") for rank in (0, 2)]
    ended = (exited(0, 1, "itself"), exited(1, -2, "itself"), exited(2, 1, "itself"))
    assert verdict_of(*LOOKS, NodeSignal(signal.SIGINT), *raised, *ended, outcome="signal").kind == "hang"
    assert verdict_of(*LOOKS, *raised, *ended).kind != "hang"


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
        ScriptError(
            RunPosition(rank, step=4, batch=4, seq=9), "RuntimeError", "Timed out waiting 1800000ms", "", None, True
        )
        for rank in (0, 2)
    ]
    assert verdict_of(*LOOKS, *errors, exited(0, 1, "itself"), exited(1), exited(2, 1, "itself")).rank == 1


@pytest.mark.parametrize(
    ("number", "waited_s", "kind", "certainty"),
    [
        (signal.SIGSEGV, 700.0, "hang", "established"),
        (signal.SIGKILL, 700.0, "hang", "established"),
        (signal.SIGSEGV, 400.0, "hang", "established"),
        (signal.SIGKILL, 400.0, "lost", "supported"),
    ],
)
def test_a_signal_that_ends_a_rank_that_waits_is_not_the_reason(verdict_of, waited_s, kind, certainty, number):
    """The watchdog aborts the communicator first, and a thread of the library may die of that. SIGKILL is from outside:
    before the timeout it is how the job ended, and the rank was waiting for another one."""
    group = GroupState("0", "0-2", 3, begun=9, phase="on_device", at=9, since_s=waited_s, timeout_s=600.0)
    died = replace(exited(0, -number, "itself"), groups=[group], still_s=waited_s)
    verdict = verdict_of(*LOOKS, died, exited(1), exited(2))
    assert (verdict.kind, verdict.rank, verdict.certainty) == (kind, 1 if kind == "hang" else 0, certainty)


@pytest.mark.parametrize(("begun", "kind"), [(8, "hang"), (9, "lost")])
def test_a_rank_that_the_watchdog_lets_go_on_has_not_met_those_that_never_came(verdict_of, begun, kind):
    """The communicator was aborted: its host went on without the others, to the end of its script, and died there."""
    group = GroupState("0", "0-1", 2, begun=9, phase="on_device", at=9, since_s=12.0, pending=9, timeout_s=10.0)
    behind = replace(group, begun=begun, at=begun, pending=None)
    waits = replace(look(0, IN_ALL_REDUCE, still_s=9.0), groups=[group])
    away = replace(look(1, LOADING, still_s=9.0), groups=[replace(behind, begun=8, at=8)])
    done = ScriptExit(RunPosition(0, step=5, batch=4, seq=9), 0)
    died = replace(exited(0, -signal.SIGSEGV, "itself", step=5), groups=[replace(group, pending=None)])
    verdict = verdict_of(waits, away, done, died, replace(exited(1), groups=[behind]), ranks=2)
    assert (verdict.kind, verdict.rank) == (kind, 1 if kind == "hang" else 0)


def test_the_watchdog_that_aborted_those_that_waited_is_not_the_reason(verdict_of):
    verdict = verdict_of(*LOOKS, exited(0, -signal.SIGABRT, "itself"), exited(1), exited(2))
    assert (verdict.kind, verdict.rank) == ("hang", 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raised_for_itself_in_the_end_is_the_reason(verdict_of, rank):
    error = ScriptError(RunPosition(rank, step=4, batch=4, seq=9), "OSError", "stale file handle", "", None, False)
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


def left_with(rank, code, by, begun, phase="none", *operation, error="", members="0-2", inside="script", trace=""):
    """How a rank ended, with what its table of the default group showed."""
    issued = [IssuedOperation(begun, *operation)] if operation else []
    group = GroupState("0", members, 3, begun, begun - (phase != "none"), phase, begun, 1.0, issued)
    exit_ = WorkerExit(RunPosition(rank, step=4, batch=4, seq=begun), code, by, inside, groups=[group])
    where = RunPosition(rank, step=4, batch=4, seq=begun)
    return [exit_, *([ScriptError(where, "RuntimeError", error, trace, None, True)] if error else [])]


TIMED_OUT = "Timed out waiting 15000ms for recv operation to complete"
CLOSED = "Connection closed by peer [127.0.0.1]:1206"
SUM = ("all_reduce", "float32", 8)


def test_a_groups_timeout_names_who_missed_and_not_who_raised(verdict_of):
    verdict = verdict_of(
        *left_with(0, 1, "itself", 9, "failed", *SUM, error=TIMED_OUT),
        *left_with(1, -15, "torchrun", 8, "none", *SUM),
        *left_with(2, -15, "torchrun", 9, "waiting", *SUM),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("hang", 1, "established")
    assert "in which ranks 0, 2 waited until the group's timeout" in verdict.statement


IN_DDP = 'File "/torch/autograd/graph.py", line 9, in _engine_run_backward'


def in_reduction(rank, begun=9, *, error=TIMED_OUT):
    """It waited for DDP's reduction, which its table counts and does not describe."""
    return left_with(rank, 1, "itself", begun, error=error, inside="raised", trace=IN_DDP)


@pytest.mark.parametrize("others", [[in_reduction(2)], [left_with(2, -15, "torchrun", 8, inside="backward")]])
def test_a_timeout_in_ddps_reduction_names_who_did_not_come(verdict_of, others):
    """Its table stood a batch earlier."""
    verdict = verdict_of(*in_reduction(0), *left_with(1, -15, "torchrun", 8), *(e for events in others for e in events))

    assert (verdict.kind, verdict.rank, verdict.certainty) == ("hang", 1, "supported")
    assert verdict.statement == (
        "Rank 1 was outside of a forward, after batch 4. "
        "It never reached the backward's reduction of gradients, in which ranks 0, 2 waited until the group's timeout."
    )
    assert (verdict.phase, verdict.step, verdict.batch) == ("script", 4, 4)


def test_a_look_at_ranks_that_had_given_up_hides_nobody_that_their_tables_show(verdict_of):
    """Ranks 0 and 2 had raised by the time that they were asked."""
    gave_up = [*in_reduction(0), *in_reduction(2)]
    places = {event.where.rank: event.where for event in gave_up if isinstance(event, WorkerExit)}
    looks = [RankLook(at, 1, 7.0, "raised", state="S") for at in places.values()]
    away = left_with(1, -15, "torchrun", 8)
    looks.append(RankLook(away[-1].where, 1, 14.0, "script", state="S", stack=LOADING))
    verdict = verdict_of(*looks, *gave_up, *away)

    assert (verdict.kind, verdict.rank, verdict.certainty) == ("hang", 1, "supported")


def test_two_that_did_not_come_to_ddps_reduction_are_both_told(verdict_of):
    away = (left_with(rank, -15, "torchrun", 8) for rank in (1, 2))
    verdict = verdict_of(*in_reduction(0), *(event for events in away for event in events))

    assert (verdict.kind, verdict.rank, [one.rank for one in verdict.concurrent]) == ("hang", None, [1, 2])


@pytest.mark.parametrize(
    ("begun", "inside", "error"),
    [
        (9, "script", TIMED_OUT),  # it has begun the same reduction: the network
        (8, "backward", TIMED_OUT),  # it may wait as the others do
        (8, "script", CLOSED),  # the link between the others may have broken while it was late
    ],
)
def test_who_may_have_come_to_ddps_reduction_is_not_named(verdict_of, begun, inside, error):
    verdict = verdict_of(
        *in_reduction(0, error=error),
        *left_with(1, -15, "torchrun", begun, inside=inside),
        *in_reduction(2, error=error),
    )
    assert (verdict.rank, verdict.certainty) == (None, "unknown")


@pytest.mark.parametrize("third", [in_reduction(2, error=CLOSED), left_with(2, -15, "torchrun", 8, inside="backward")])
def test_a_rank_that_issued_what_the_others_did_not_is_named(verdict_of, third):
    """gloo ended it, as DDP's reduction of the others has another size."""
    verdict = verdict_of(
        *in_reduction(0, error=CLOSED), *left_with(1, -signal.SIGABRT, "itself", 9, "waiting", *SUM), *third
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "supported")
    assert verdict.statement.startswith(
        "Rank 1 waits in all_reduce, where 2 other ranks are in the backward's reduction of gradients"
    )


def test_of_two_ranks_that_issued_different_collectives_neither_is_named(verdict_of):
    aborted = left_with(1, -signal.SIGABRT, "itself", 9, "waiting", *SUM, members="0-1")
    raised = left_with(0, 1, "itself", 9, error=CLOSED, inside="raised", trace=IN_DDP, members="0-1")
    verdict = verdict_of(*raised, *aborted, ranks=2)

    assert (verdict.rank, verdict.certainty) == (None, "unknown")
    assert "rank 1 waits in all_reduce, and rank 0 is in the backward's reduction of gradients" in verdict.statement


def test_a_rank_that_computes_in_its_backward_is_not_accused_where_no_backward_reduces(verdict_of):
    """The script sums its gradients itself, and the link between two of its ranks has broken."""
    verdict = verdict_of(
        *left_with(0, 1, "itself", 9, "failed", *SUM, error=CLOSED),
        *left_with(1, 1, "itself", 9, "failed", *SUM, error=CLOSED),
        *left_with(2, -15, "torchrun", 8, inside="backward"),
    )
    assert (verdict.rank, verdict.certainty) == (None, "unknown")


def test_a_lost_connection_alone_names_nobody_who_was_elsewhere(verdict_of):
    """The link between two ranks may have broken while a third one was late."""
    verdict = verdict_of(
        *left_with(0, 1, "itself", 9, "failed", *SUM, error=CLOSED),
        *left_with(1, -15, "torchrun", 8, "none", *SUM),
        *left_with(2, -15, "torchrun", 9, "waiting", *SUM),
    )
    assert verdict.rank is None


def test_a_rank_that_was_aborted_for_what_another_one_sent_is_not_named(verdict_of):
    """gloo ends a rank that is sent more than it expects."""
    verdict = verdict_of(
        *left_with(0, -signal.SIGABRT, "itself", 9, "waiting", *SUM),
        *left_with(1, 1, "itself", 9, "failed", "all_reduce", "float64", 8, error=CLOSED),
        *left_with(2, 1, "itself", 9, "failed", *SUM, error=CLOSED),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "supported")


def test_a_watchdog_that_aborts_a_rank_in_a_collective_does_not_name_it(verdict_of):
    verdict = verdict_of(
        *left_with(0, -signal.SIGABRT, "itself", 9, "waiting", *SUM),
        *left_with(1, -15, "torchrun", 9, "waiting", *SUM),
        *left_with(2, -15, "torchrun", 9, "waiting", *SUM),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("lost", None, "unknown")


def test_a_rank_that_left_early_is_named_by_those_that_lost_it(verdict_of):
    verdict = verdict_of(
        *left_with(0, 1, "itself", 9, "failed", *SUM, error=CLOSED),
        *left_with(1, 0, "itself", 8, "none", *SUM),
        *left_with(2, 1, "itself", 9, "failed", *SUM, error=CLOSED),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "established")
    assert "left early" in verdict.statement


def test_a_rank_that_left_early_and_was_aborted_at_its_end_left_early(verdict_of):
    """Its group was never destroyed, and a thread of gloo's met the end of the interpreter."""
    verdict = verdict_of(
        *left_with(0, -15, "torchrun", 9, "failed", *SUM, error=CLOSED),
        ScriptExit(RunPosition(1, step=4, batch=4, seq=8), 0),
        *left_with(1, -signal.SIGABRT, "itself", 8, "none", *SUM),
        *left_with(2, -15, "torchrun", 9, "failed", *SUM, error=CLOSED),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "established")
    assert "left early" in verdict.statement
    assert "rank 1 was aborted by SIGABRT" in verdict.evidence


def test_a_rank_that_had_done_its_part_and_left_is_not_blamed(verdict_of):
    verdict = verdict_of(
        *left_with(0, 1, "itself", 9, "failed", *SUM, error=CLOSED),
        *left_with(1, 0, "itself", 9, "none", *SUM),
        *left_with(2, 1, "itself", 9, "failed", *SUM, error=CLOSED),
    )
    assert verdict.rank is None


def test_a_rank_that_raised_for_itself_comes_before_what_the_tables_say(verdict_of):
    own = ScriptError(RunPosition(1, step=4, batch=4, seq=8), "ValueError", "boom", "", None, False)
    verdict = verdict_of(
        *left_with(0, 1, "itself", 9, "failed", *SUM, error=TIMED_OUT),
        own,
        *left_with(1, 1, "itself", 8, "none", *SUM),
        *left_with(2, -15, "torchrun", 9, "waiting", *SUM),
    )
    assert (verdict.kind, verdict.rank) == ("crash", 1)


def leaving(rank, phase, seq=9, still_s=8.0):
    return RankLook(RunPosition(rank, step=4, batch=4, seq=seq), 1, still_s, phase, state="R")


def test_ranks_that_have_not_ended_are_a_hang(verdict_of):
    verdict = verdict_of(*(leaving(rank, "raised") for rank in range(3)), *ENDED)
    assert verdict.kind == "hang"
    assert verdict.statement == "Ranks 0-2 have not exited for 8 s since their script raised."


@pytest.mark.parametrize(
    ("still_s", "told", "kind"),
    [
        (0.3, [NodeSignal(signal.SIGTERM)], "interrupted"),
        (8.0, [NodeSignal(signal.SIGTERM)], "interrupted"),
        (300.0, [NodeSignal(signal.SIGTERM)], "hang"),
        (0.3, [], "crash"),
    ],
)
def test_ranks_that_were_about_to_leave_when_they_were_asked_are_no_hang(verdict_of, still_s, told, kind):
    left = exited(0, 7, "itself")
    verdict = verdict_of(*(leaving(rank, "finished", still_s=still_s) for rank in (1, 2)), *told, left, *ENDED[1:])
    assert verdict.kind == kind


def test_ranks_that_were_slow_to_end_on_a_loaded_machine_are_no_hang(verdict_of):
    """Rank 1 has left early, the others lost the connection to it, and all three took long to leave."""
    verdict = verdict_of(
        *(leaving(0, "raised"), leaving(1, "finished", seq=8), leaving(2, "raised")),
        *left_with(0, 1, "itself", 9, "failed", *SUM, error=CLOSED),
        *left_with(1, 0, "itself", 8, "none", *SUM),
        *left_with(2, -15, "torchrun", 9, "failed", *SUM, error=CLOSED),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "established")
    assert "left early" in verdict.statement
