"""Which rank was first. Facts are made by folding hand-made messages; certainty is part of the answer."""

from __future__ import annotations

import random

import msgspec
import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.alarm_evidence import CaptureFile, ForwardCaptured, SecondRun
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.own_limits import LooseParameters, NotLookedInto, OwnFault, UnmeasuredTensor, UnreadStates
from gpuwatch.core.events.rank_standing import GroupState
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import LeftGroup, ScriptExit
from gpuwatch.core.identity import number_of_process
from gpuwatch.core.wire.messages import EventMessage, NameDefinitions, PageMessage
from hypothesis import given
from hypothesis import strategies as st


def judge(*bodies, agent="a0", lost=()):
    return decide(fold(((agent, n, body) for n, body in enumerate(bodies, 1)), lost))


def leaf_origin(make, rank=0, *, module="fc2", value=None, **place):
    """A batch in which `module` made a bad value out of finite ones."""
    batch = make.Batch(rank, **place)
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.INF if value is None else value)
    batch.call("fc1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor()})
    batch.call(module, "Linear", given=[h], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[y])
    return batch


def clean(make, rank=0, **place):
    return leaf_origin(make, rank, value=1.0, **place)


def bad_weight(make, rank=0, *, module="fc1", **place):
    batch = make.Batch(rank, **place)
    x, y = batch.tensor(), batch.tensor(make.NAN)
    batch.call(module, "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(make.NAN)})
    batch.call("", "Net", given=[x], returned=[y])
    return batch


def bad_input(make, rank=0, **place):
    batch = make.Batch(rank, **place)
    bad, y = batch.tensor(make.NAN), batch.tensor(make.NAN)
    batch.call("fc1", "Linear", given=[bad], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[bad], returned=[y])
    return batch


def received(make, rank=0, *, seq, **place):
    """A batch in which a collective in the middle of the forward brought the bad value of another rank."""
    batch = make.Batch(rank, seq=seq, **place)
    x, h, bad = batch.tensor(), batch.tensor(), batch.tensor(make.NAN)
    batch.call("fc1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor()}, seq=seq - 1)
    batch.call("fc2", "Linear", given=[bad], returned=[batch.tensor(make.NAN)], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    return batch


# -- overflow -----------------------------------------------------------------------------------------------------


def test_a_leaf_on_one_rank_is_established(make):
    guilty, peer = leaf_origin(make, 1, batch=7, seq=14), clean(make, 0, batch=7, seq=14)
    verdict = judge(make.hello(host="alpha"), *guilty.messages(), *peer.messages(), make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank, verdict.host, verdict.certainty) == ("overflow", 1, "alpha", "established")
    assert (verdict.module, verdict.cls, verdict.phase, verdict.role) == ("fc2", "Linear", "forward", "output")
    assert (verdict.value, verdict.dtype, verdict.attempt, verdict.step, verdict.batch) == ("+inf", "float32", 0, 7, 7)
    assert verdict.statement == (
        "Rank 1 on alpha overflowed first: +inf in the output of `fc2` (Linear), forward, batch 7."
    )
    assert any("rank 0" in line and "finite" in line for line in verdict.evidence)
    assert verdict.concurrent == []


@pytest.mark.parametrize(
    "unwatched",
    [
        lambda make: [make.ended(0, 1, "torchrun", phase="starting")],
        lambda make: [make.ended(0, 1, "torchrun", phase="unwatched")],
        lambda make: make.finished(0, last={"hooks": "failed"}),
    ],
    ids=["no recorder", "another program", "no hooks"],
)
def test_a_rank_beside_one_that_nobody_watched_is_not_established_as_the_first(make, unwatched):
    guilty = leaf_origin(make, 1, batch=7, seq=14)
    verdict = judge(make.hello(host="alpha"), *guilty.messages(), *unwatched(make), make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("overflow", 1, "supported")
    assert "rank 0 was not watched: it may have been first" in verdict.evidence


def test_the_containers_own_code_is_said_in_words(make):
    batch = make.Batch(0, batch=2)
    x = batch.tensor()
    batch.call("layer.2.fc2", "Linear", given=[x], returned=[batch.tensor()], parent="layer.2", depth=3)
    batch.call("layer.2", "Block", given=[x], returned=[batch.tensor(make.INF)], depth=2)
    verdict = judge(make.hello(nproc=1), *batch.messages())
    assert (verdict.module, verdict.between) == ("layer.2", ("layer.2.fc2", None))
    assert verdict.statement.endswith(
        "+inf in `layer.2` (Block)'s own forward, after `layer.2.fc2` returned and before its own return, batch 2."
    )


def test_the_models_input(make):
    verdict = judge(make.hello(nproc=1), *bad_input(make, batch=3).messages())
    assert (verdict.phase, verdict.module, verdict.role) == ("input", "", "input[0]")
    assert "was bad before the model saw it" in verdict.statement


def test_the_rank_with_fewer_collectives_was_first(make):
    first, second = leaf_origin(make, 1, batch=5, seq=9), leaf_origin(make, 0, batch=6, seq=12)
    verdict = judge(make.hello(), *second.messages(), *first.messages())
    assert (verdict.rank, verdict.certainty, verdict.concurrent) == (1, "established", [])
    assert any("rank 0 first saw a non-finite value later" in line for line in verdict.evidence)


def test_two_ranks_between_the_same_two_collectives_are_concurrent(make):
    left, right = leaf_origin(make, 0, seq=9), leaf_origin(make, 1, seq=9, module="other")
    verdict = judge(make.hello(), *left.messages(), *right.messages())
    assert verdict.certainty == "supported"
    assert {verdict.rank, *(c.rank for c in verdict.concurrent)} == {0, 1}
    assert {verdict.module, *(c.module for c in verdict.concurrent)} == {"fc2", "other"}


def test_a_bad_input_and_an_origin_in_the_same_stretch_are_concurrent(make):
    """Nothing puts the two in order, so neither may be called the later one."""
    fed, made = bad_input(make, 0, seq=9), leaf_origin(make, 1, seq=9)
    verdict = judge(make.hello(), *fed.messages(), *made.messages())
    assert verdict.certainty == "supported"
    assert {verdict.rank, *(c.rank for c in verdict.concurrent)} == {0, 1}
    assert not any("later" in line for line in verdict.evidence)


def test_a_bad_input_comes_before_what_a_collective_made_of_it(make):
    """Rank 1 was fed nan; SyncBatchNorm's collective brought it to rank 0 in the middle of the forward."""
    fed = make.Batch(1, seq=3)
    bad = fed.tensor(make.NAN)
    fed.call("fc1", "Linear", given=[bad], returned=[fed.tensor(make.NAN)], seq=3)
    fed.call("", "Net", given=[bad], returned=[fed.tensor(make.NAN)], seq=8)
    verdict = judge(make.hello(), *fed.messages(), *received(make, 0, seq=4).messages())
    assert (verdict.rank, verdict.phase) == (1, "input")


def test_what_a_collective_brought_is_not_first(make):
    verdict = judge(make.hello(), *received(make, 0, seq=4).messages(), *leaf_origin(make, 1, seq=3).messages())
    assert (verdict.rank, verdict.module) == (1, "fc2")


def test_the_same_bad_weight_on_all_ranks_names_nobody(make):
    ranks = [bad_weight(make, rank, batch=4, seq=20) for rank in range(3)]
    verdict = judge(make.hello(nproc=3), *(body for rank in ranks for body in rank.messages()))
    assert (verdict.kind, verdict.certainty, verdict.rank) == ("overflow", "unknown", None)
    assert (verdict.phase, verdict.module, verdict.role, verdict.batch) == ("weight", "fc1", "weight", 4)
    assert verdict.statement.startswith("Ranks 0, 1 and 2 met a non-finite weight in batch 4")


def test_a_bad_weight_on_one_rank_while_the_others_were_seen_clean_is_its_own(make):
    verdict = judge(make.hello(), *bad_weight(make, 1, seq=9).messages(), *clean(make, 0, seq=9).messages())
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "weight", "established")


def test_a_bad_weight_on_the_rank_that_aborted_first_is_not_established(make):
    """DDP brought the same nan to every rank; torchrun stopped rank 1 before it entered that batch."""
    mine, peer = bad_weight(make, 0, batch=4, seq=20), clean(make, 1, batch=3, seq=15)
    verdict = judge(
        make.hello(),
        *mine.messages(),
        *peer.messages(),
        make.ended(0, 1, batch=4, seq=20),
        make.ended(1, -15, "torchrun", batch=3, seq=20),
        make.NodeBye("failed"),
    )
    assert verdict.kind == "overflow"
    assert verdict.certainty != "established"


def test_without_a_process_group_batches_order_and_the_verdict_says_so(make):
    first, second = leaf_origin(make, 1, batch=2, seq=-1), leaf_origin(make, 0, batch=5, seq=-1)
    verdict = judge(make.hello(), *first.messages(), *second.messages())
    assert (verdict.rank, verdict.certainty) == (1, "supported")


def test_without_the_page_the_event_supports_and_no_more(make):
    verdict = judge(make.hello(nproc=1), *leaf_origin(make).messages(page=False))
    assert (verdict.rank, verdict.module, verdict.certainty) == (0, "fc2", "supported")
    assert any("not received" in line for line in verdict.evidence)


def test_the_first_attempt_that_overflowed_counts(make):
    later, earlier = leaf_origin(make, 0, attempt=1, seq=2), leaf_origin(make, 1, attempt=0, seq=50)
    verdict = judge(make.hello(), *later.messages(), *earlier.messages())
    assert (verdict.rank, verdict.attempt) == (1, 0)


def test_a_benign_mask_is_a_clean_run(make):
    batch = make.Batch(0)
    mask = batch.tensor(make.NEGINF)
    batch.call("attention", "Attention", given=[batch.tensor()], returned=[batch.tensor()], kwargs={"mask": mask})
    batch.call("", "Net", given=[batch.tensor(), mask], returned=[batch.tensor()])
    verdict = judge(make.hello(nproc=1), *batch.messages(), *make.finished(0, batch=0), make.NodeBye("ok"))
    assert verdict.kind == "clean"


def test_ranks_that_ended_because_of_it_are_the_cascade(make):
    verdict = judge(
        make.hello(nproc=3),
        *leaf_origin(make, 1, seq=3).messages(),
        *clean(make, 0, seq=3).messages(),
        make.raised(0, "RuntimeError", "Connection closed by peer", peer=True, seq=4),
        make.ended(0, 1),
        make.raised(1, "OverflowDetected", "inf", seq=3),
        make.ended(1, 1),
        make.ended(2, -15, "torchrun"),
        make.NodeBye("failed"),
    )
    assert verdict.rank == 1
    assert {c.rank: c.how.split()[0] for c in verdict.cascade} == {0: "raised", 2: "was"}


# -- ranks that ended badly ---------------------------------------------------------------------------------------


def test_a_killed_rank_is_lost_and_its_peers_only_cascade(make):
    verdict = judge(
        make.hello(host="alpha"),
        make.ended(1, -9, phase="forward", module="layer.1", cls="Linear", step=6, batch=6, seq=12),
        make.raised(0, "RuntimeError", "Connection closed by peer", peer=True, seq=12),
        make.ended(0, 1, seq=12),
        make.NodeBye("failed"),
    )
    assert (verdict.kind, verdict.rank, verdict.signal, verdict.certainty) == ("lost", 1, "SIGKILL", "established")
    assert verdict.statement == (
        "Rank 1 on alpha was killed by SIGKILL in the forward of batch 6, in `layer.1` (Linear)."
    )
    assert [c.rank for c in verdict.cascade] == [0]


@pytest.mark.parametrize("script_ended", [True, False])
def test_a_rank_that_torch_aborts_after_its_script_had_ended_gets_the_known_reason(make, script_ended):
    ends = [EventMessage(ScriptExit(RunPosition(1, step=40, batch=39, seq=12), 0))] if script_ended else []
    verdict = judge(
        make.hello(host="alpha"),
        *ends,
        make.ended(1, -6, phase="finished" if script_ended else "script", step=40, batch=39, seq=12),
        make.ended(0, -15, by="torchrun", phase="finished", step=40, batch=39, seq=12),
        make.NodeBye("failed"),
    )
    assert (verdict.kind, verdict.rank, verdict.signal) == ("lost", 1, "SIGABRT")
    assert ("pytorch/pytorch#179291" in verdict.next[0]) == script_ended


def test_a_crash_comes_before_the_peer_failures_that_it_caused(make):
    verdict = judge(
        make.hello(host="alpha"),
        make.raised(0, "RuntimeError", "Connection reset by peer", peer=True, seq=6),
        make.raised(1, "ValueError", "boom\nmore", module="fc2", seq=7, batch=3),
        make.ended(0, 1),
        make.ended(1, 1),
        make.NodeBye("failed"),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "established")
    assert verdict.statement == "Rank 1 on alpha raised ValueError, inside `fc2`: boom."


LEFT = "left early: its process ended with exit code 0, outside of a forward, after batch 5, and ranks 0 and 2 lost"


@pytest.mark.parametrize(
    ("seq", "third", "kind", "named", "said"),
    [
        (24, ["raised", "ended"], "crash", 1, LEFT),
        (24, ["stopped"], "crash", 1, LEFT.replace("ranks 0 and 2", "rank 0")),
        (
            26,
            ["raised", "ended"],
            "lost",
            None,
            "it is unknown which one failed first",
        ),  # it had reached all that they had
        (24, [], "lost", None, "it is unknown which one failed first"),  # and one was not heard
    ],
)
def test_who_left_before_the_others_lost_a_peer_left_early(make, seq, third, kind, named, said):
    of_rank_2 = {
        "raised": make.raised(2, "RuntimeError", "Connection closed by peer", peer=True, seq=26),
        "ended": make.ended(2, 1, seq=26),
        "stopped": make.ended(2, -15, "torchrun", seq=26),
    }
    verdict = judge(
        make.hello(nproc=3),
        make.ended(1, 0, phase="script", step=6, batch=5, seq=seq),
        make.raised(0, "RuntimeError", "Connection closed by peer", peer=True, seq=26),
        make.ended(0, 1, seq=26),
        *(of_rank_2[what] for what in third),
        make.NodeBye("failed"),
    )

    assert (verdict.kind, verdict.rank) == (kind, named)
    assert said in verdict.statement
    assert verdict.certainty == ("supported" if named is not None else "unknown")


@pytest.mark.parametrize(
    ("world", "kind"),
    [(4, "crash"), (5, "lost")],
    ids=["behind in the group of all, ahead in its own", "it had reached all that they had"],
)
def test_who_left_early_is_behind_in_a_group_and_not_in_a_sum_over_groups(make, world, kind):
    def ended(rank, code, own, begun, group):
        tables = [GroupState("0", "0-2", 3, begun=begun), GroupState(group, "", 1, begun=own)]
        message = make.ended(rank, code, seq=own + begun, step=6, batch=5)
        return EventMessage(msgspec.structs.replace(message.event, groups=tables))

    failed = [
        message
        for rank in (0, 2)
        for message in (
            make.raised(rank, "RuntimeError", "Connection closed by peer", peer=True, seq=7),
            ended(rank, 1, 2, 5, f"of {rank}"),
        )
    ]
    verdict = judge(make.hello(nproc=3), ended(1, 0, 30, world, "of 1"), *failed, make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank) == (kind, 1 if kind == "crash" else None)


@pytest.mark.parametrize(("nproc", "others"), [(2, False), (3, True)])
def test_the_ranks_that_are_not_among_these_are_spoken_of_where_there_are_any(make, nproc, others):
    lost = [make.raised(rank, "RuntimeError", "Connection closed by peer", peer=True, seq=26) for rank in range(2)]
    ended = [make.ended(rank, 1, seq=26) for rank in range(2)]
    verdict = judge(make.hello(nproc=nproc), *lost, *ended, make.NodeBye("failed"))

    assert (
        verdict.statement == "Ranks 0 and 1 lost the connection to another rank; it is unknown which one failed first."
    )
    assert ("not among these" in verdict.next[0]) == others


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("boom", "raised ValueError: boom"),
        ("boom.", "raised ValueError: boom"),
        ("it took too long ....", "raised ValueError: it took too long"),
        ("...", "raised ValueError"),
        ("", "raised ValueError"),
    ],
)
def test_what_was_raised_may_end_in_periods_and_the_sentence_ends_in_one(make, message, said):
    verdict = judge(make.hello(), make.raised(0, "ValueError", message), make.ended(0, 1), make.NodeBye("failed"))

    assert verdict.statement == f"Rank 0 on h0 {said}."


def test_ranks_that_failed_at_the_same_point_share_the_blame(make):
    bodies = [make.raised(rank, seq=4) for rank in (1, 0)]
    verdict = judge(make.hello(), *bodies, make.ended(0, 1), make.ended(1, 1), make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 0, "supported")
    assert "rank 1" in verdict.statement


MS = 10**6
BEGAN = 10**12


@pytest.mark.parametrize(
    ("first_ms", "second_ms", "second_host", "named", "certainty", "says"),
    [
        (60, 0, "alpha", 1, "supported", ["rank 0", "ms later"]),
        (0, 60, "alpha", 0, "supported", ["rank 1", "ms later"]),
        (9, 0, "alpha", 1, "supported", ["(and rank 0 at the same point)"]),
        (50, 0, "beta", 0, "supported", ["(and rank 1 at the same point)"]),  # clocks of hosts are not compared
        (None, 0, "alpha", 0, "supported", ["(and rank 1 at the same point)"]),
    ],
)
@pytest.mark.parametrize("first", ["killed", "raised"])
@pytest.mark.parametrize("second", ["killed", "raised"])
def test_of_two_ranks_at_the_same_point_the_clock_of_their_host_tells_the_first(
    make, first, second, first_ms, second_ms, second_host, named, certainty, says
):
    def ends(rank, how, ms, agent):
        at = 0 if ms is None else BEGAN + ms * MS
        if how == "killed":
            times = (at - 20 * MS, at + 5 * MS) if at else (0, at)  # its agent looks now and then
            return [(agent, make.ended(rank, -9, phase="forward", batch=3, seq=7, times_ns=times))]
        raised = make.raised(rank, "ValueError", "boom", batch=3, seq=7, time_ns=at)
        return [(agent, raised), (agent, make.ended(rank, 1, seq=7, times_ns=(BEGAN, BEGAN + 9_000 * MS)))]

    nodes = ["a0"] if second_host == "alpha" else ["a0", "a1"]
    bodies = [
        *(
            (agent, make.hello(agent, host, nodes=len(nodes)))
            for agent, host in zip(nodes, ("alpha", "beta"), strict=False)
        ),
        *ends(0, first, first_ms, "a0"),
        *ends(1, second, second_ms, nodes[-1]),
        *((agent, make.NodeBye("failed")) for agent in nodes),
    ]
    verdict = decide(fold((agent, n, body) for n, (agent, body) in enumerate(bodies, 1)))
    how = {0: first, 1: second}[named]
    assert (verdict.kind, verdict.rank) == ("lost" if how == "killed" else "crash", named)
    assert verdict.certainty == certainty
    assert all(words in f"{verdict.statement} {verdict.evidence}" for words in says)


def test_an_exit_code_without_an_exception_is_a_crash(make):
    verdict = judge(make.hello(), make.ended(0, 3), make.ended(1, -15, "torchrun"), make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank) == ("crash", 0)
    assert "exit code 3" in verdict.statement


def test_a_rank_that_torchrun_stopped_is_not_blamed(make):
    verdict = judge(make.hello(), make.ended(0, -15, "torchrun"), make.ended(1, 1), make.NodeBye("failed"))
    assert verdict.rank == 1


def silent_node(make, outcome):
    messages = [("a0", 1, make.hello("a0", "alpha", 1, 2)), ("a1", 1, make.hello("a1", "beta", 1, 2))]
    return [*messages, ("a1", 0, make.NodeBeat([make.state(1, batch=41)], {})), ("a0", 2, make.NodeBye(outcome))]


def test_a_node_that_went_silent_while_the_job_ended_well_is_not_lost_and_not_clean(make):
    messages = silent_node(make, "ok")
    messages += [("a0", n, body) for n, body in enumerate(make.finished(0, last={"world_size": 2}), 3)]
    verdict = decide(fold(messages, ["a1"]))
    assert (verdict.kind, verdict.certainty, verdict.rank) == ("unknown", "unknown", None)
    assert verdict.missing == ["rank 1 was not heard from after batch 41"]
    assert "No overflow seen" in verdict.statement
    assert verdict.missing[0] in verdict.statement


def test_a_node_that_went_silent_is_undetermined_and_only_supported(make):
    verdict = decide(fold(silent_node(make, "failed"), ["a1"]))
    assert (verdict.kind, verdict.host, verdict.rank, verdict.certainty) == ("lost", "beta", 1, "supported")
    assert "or the link" in verdict.statement


def test_a_signal_from_outside_is_an_interruption(make):
    verdict = judge(
        make.hello(), EventMessage(NodeSignal(15)), make.ended(0, -15, "torchrun"), make.NodeBye("signal", 15)
    )
    assert (verdict.kind, verdict.signal) == ("interrupted", "SIGTERM")


@pytest.mark.parametrize(
    ("signal", "why"),
    [
        (NodeSignal(15), "by SIGTERM; no"),
        (
            NodeSignal(15, 1, "SLURM: the job has reached its time limit"),
            "by SIGTERM (SLURM: the job has reached its time limit); no",
        ),
        (NodeSignal(12), "by SIGUSR2 (the scheduler's warning: the time limit is near); no"),
    ],
)
def test_an_interruption_says_who_sent_the_signal_where_that_is_known(make, signal, why):
    verdict = judge(make.hello(), EventMessage(signal), make.NodeBye("signal", signal.signal))
    assert why in verdict.statement


@pytest.mark.parametrize(
    ("signal", "batch", "is_told"), [(15, 42, True), (10, 42, True), (15, -1, False), (2, 42, False)]
)
def test_a_job_that_trained_is_to_be_started_again_unless_a_person_ended_it(make, signal, batch, is_told):
    ends = [make.ended(rank, -15, "torchrun", batch=batch) for rank in (0, 1)]
    verdict = judge(make.hello(), EventMessage(NodeSignal(signal)), *ends, make.NodeBye("signal", signal))
    assert verdict.kind == "interrupted"
    assert any("Start the job again" in step for step in verdict.next) == is_told


def test_a_rank_that_the_signal_has_reached_by_itself_was_not_first(make):
    """Some of SLURM's ways to send a signal reach every process of the job, before torchrun does."""
    hit = [make.ended(0, -12), make.ended(1, -15, "torchrun")]
    verdict = judge(make.hello(), EventMessage(NodeSignal(12)), *hit, make.NodeBye("signal", 12))
    assert (verdict.kind, verdict.signal) == ("interrupted", "SIGUSR2")
    verdict = judge(make.hello(), EventMessage(NodeSignal(15)), make.ended(0, -9), make.NodeBye("signal", 15))
    assert (verdict.kind, verdict.signal, verdict.rank) == ("lost", "SIGKILL", 0)


@pytest.mark.parametrize(("seconds_before", "kind"), [(20, "interrupted"), (120, "lost")])
def test_a_rank_that_missed_others_as_the_signal_came_was_not_first(make, seconds_before, kind):
    """The signal reaches all nodes, and one of them ends its ranks a moment before the others do."""
    signalled = 1_000_000_000_000
    at = {"seq": 9, "time_ns": signalled - seconds_before * 10**9}
    verdict = judge(
        make.hello(),
        make.raised(0, "RuntimeError", "Connection reset by peer", peer=True, **at),
        make.ended(0, -15, "torchrun"),
        make.ended(1, -15, "torchrun"),
        EventMessage(NodeSignal(15, signalled)),
        make.NodeBye("signal", 15),
    )
    assert (verdict.kind, verdict.rank) == (kind, None)


def test_torchrun_failed_and_no_rank_said_why(make):
    verdict = judge(make.hello(), make.NodeBye("failed"))
    assert (verdict.kind, verdict.certainty, verdict.rank) == ("crash", "unknown", None)


def test_a_restart_that_succeeded_is_clean(make):
    bodies = [make.raised(0), *make.broken_off(0), *make.finished(0, attempt=1), make.NodeBye("ok")]
    assert judge(make.hello(nproc=1), *bodies).kind == "clean"


EARLIER_FAULT = EventMessage(OwnFault(RunPosition(0), "forward hook", "TypeError: x"))


@pytest.mark.parametrize(
    ("first_attempt", "lacking"),
    [
        (lambda make: make.broken_off(0), None),
        (lambda make: make.broken_off(0, -15, "torchrun", phase="forward"), None),
        (lambda make: make.broken_off(0, batch=-1, page=-1), None),
        (lambda make: [], None),
        (lambda make: make.broken_off(0, last={"hooks": "detached"}), "rank 0 was no longer watched after errors"),
        (lambda make: make.broken_off(0, last={"hooks": "failed"}), "rank 0 could not be watched"),
        (lambda make: make.broken_off(0, last={"records_lost": 2}), "rank 0 lost 2 records"),
        (lambda make: make.broken_off(0, last={"faults": 1}), "rank 0 met 1 error in gpuwatch itself that its log"),
        (lambda make: [EARLIER_FAULT, *make.broken_off(0)], "rank 0 met an error in gpuwatch itself (forward hook"),
        (lambda make: make.broken_off(0, last={"rows_lost": 2}), "rank 0 had no room for 2 rows"),
        (lambda make: make.broken_off(0, last={"pending": 2}), "rank 0 ended before 2 numbers had been read back"),
        (lambda make: make.broken_off(0, last={"calls_left_out": 2}), "rank 0 made 2 module calls in a thread"),
        (lambda make: make.broken_off(0, last={"world_size": 2}), "rank 1 was never heard from"),
        (lambda make: make.broken_off(0, last={"final": False}), "rank 0 did not send the end of its record"),
        (lambda make: [make.ended(0, 1, phase="starting")], "rank 0 had no recorder"),
        (lambda make: [make.ended(0, 1, phase="unwatched")], "rank 0 ran a program that is not watched"),
        (lambda make: [make.NodeBeat([make.state(0, batch=4)], {})], "rank 0 was not heard from after batch 4"),
    ],
)
def test_what_was_lost_before_a_restart_keeps_a_run_from_being_clean(make, first_attempt, lacking):
    bodies = [*first_attempt(make), *make.finished(0, attempt=1), make.NodeBye("ok")]
    verdict = judge(make.hello(nproc=1), *bodies)
    if lacking is None:
        assert (verdict.kind, verdict.certainty, verdict.missing) == ("clean", "established", [])
    else:
        assert (verdict.kind, verdict.certainty) == ("unknown", "unknown")
        (clause,) = verdict.missing
        assert clause.startswith(f"in attempt 0, {lacking}")


@pytest.mark.parametrize(("ranks", "words"), [(1, "1 rank, 8 batches"), (2, "2 ranks, 8 batches")])
def test_a_clean_run(make, ranks, words):
    bodies = [body for rank in range(ranks) for body in make.finished(rank, batch=7)]
    verdict = judge(make.hello(nproc=ranks), *bodies, make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("clean", "established")
    assert words in verdict.statement


def test_a_rank_without_a_recorder_keeps_a_run_from_being_clean(make):
    bodies = [*make.finished(0), make.ended(1, 0, phase="starting"), make.NodeBye("ok")]
    verdict = judge(make.hello(), *bodies)
    assert (verdict.kind, verdict.missing) == ("unknown", ["rank 1 had no recorder"])


HIDDEN = EventMessage(NotLookedInto(RunPosition(1), "", "Net", around=False))
STEPPED = EventMessage(LooseParameters(RunPosition(1), "SGD", 3, 3))
UNMEASURED = EventMessage(UnmeasuredTensor(RunPosition(1), "fc", "Linear", "output", "float32"))
FAULT = EventMessage(OwnFault(RunPosition(1), "hook", "TypeError: x"))


def empty_batch(make):
    """A batch of rank 1 without a frame: no module matches --modules."""
    batch = make.Batch(1)
    return [batch.definitions(), batch.page_message()]


@pytest.mark.parametrize(
    ("end_of_rank_1", "lacking"),
    [
        (lambda make: [], "rank 1 was never heard from"),
        (lambda make: [make.NodeBeat([make.state(1, batch=41)], {})], "rank 1 was not heard from after batch 41"),
        (lambda make: [make.ended(1, None, batch=41)], "rank 1 was not heard from after batch 41"),
        (lambda make: [make.ended(1, None, batch=-1)], "rank 1 was not heard from at its end"),
        (lambda make: [make.ended(1, 0, phase="unwatched")], "rank 1 ran a program that is not watched"),
        (lambda make: make.finished(1, last={"final": False}), "rank 1 did not send the end of its record"),
        (lambda make: make.finished(1, last={"hooks": "failed"}), "rank 1 could not be watched: the hooks failed"),
        (lambda make: make.finished(1, batch=-1, page=-1), "rank 1 called no module"),
        (lambda make: make.finished(1, page=-1), "rank 1 skipped every batch"),
        (
            lambda make: make.broken_off(1, 0, batch=4),
            "rank 1 ended with exit code 0 outside of a forward, after batch 4: the end of its script was not reported",
        ),
        (
            lambda make: [EventMessage(LeftGroup(make.where(1, batch=3))), *make.broken_off(1, 0, batch=4)],
            "rank 1 ended with exit code 0 outside of a forward, after batch 4: the end of its script was not reported",
        ),
        (
            lambda make: make.broken_off(1, 0, phase="unwatched"),
            "rank 1 became another program (os.exec), which is not watched",
        ),
        (lambda make: [*empty_batch(make), *make.finished(1)], "rank 1 watched no module in its batches"),
        (
            lambda make: [*empty_batch(make), *make.finished(1, last={"batches_skipped": 1})],
            "rank 1 watched no module in its batches",
        ),
        (lambda make: make.finished(1, last={"pending": 7}), "rank 1 ended before 7 numbers had been read back"),
        (lambda make: make.finished(1, last={"rows_lost": 1}), "rank 1 had no room for 1 row"),
        (
            lambda make: make.finished(1, last={"rows_interrupted": 2}),
            "rank 1 lost 2 rows that were being read on a device when a signal's handler raised",
        ),
        (
            lambda make: [UNMEASURED, *make.finished(1)],
            "rank 1 had tensors that could not be measured, such as output of `fc` (Linear) (float32)",
        ),
        (
            lambda make: [HIDDEN, *make.finished(1)],
            "rank 1 ran compiled code of the root module (Net) that was not inspected",
        ),
        (
            lambda make: [STEPPED, *make.finished(1)],
            "rank 1 trained 3 parameters on a device that no called module has (SGD)",
        ),
        (lambda make: [FAULT, *make.finished(1)], "rank 1 met an error in gpuwatch itself (hook: TypeError: x)"),
        (
            lambda make: [FAULT, *make.finished(1, last={"faults": 3})],
            "rank 1 met 2 errors in gpuwatch itself that its log had no room for",
        ),
        (lambda make: make.finished(1, last={"records_lost": 1}), "rank 1 lost 1 record: its log was full"),
        (lambda make: make.finished(1, last={"hooks": "detached"}), "rank 1 was no longer watched after errors in"),
        (lambda make: make.finished(1, last={"world_size": 4}), "ranks 2, 3 were never heard from"),
        (lambda make: make.finished(1, last={"world_size": (1 << 63) - 1}), "ranks 2-65 were never heard from"),
    ],
)
def test_what_could_hold_an_overflow_and_was_not_heard_keeps_a_run_from_being_clean(make, end_of_rank_1, lacking):
    verdict = judge(make.hello(), *make.finished(0, last={"world_size": 2}), *end_of_rank_1(make), make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("unknown", "unknown")
    assert any(clause.startswith(lacking) for clause in verdict.missing), verdict.missing


def test_a_model_that_only_compiled_code_calls_is_unknown_with_what_to_do(make):
    hidden = [HIDDEN, *make.finished(1, batch=-1, page=-1)]
    verdict = judge(make.hello(), *make.finished(0, last={"world_size": 2}), *hidden, make.NodeBye("ok"))
    assert verdict.kind == "unknown"
    assert verdict.missing[:2] == [
        "rank 1 called no module",
        "rank 1 ran compiled code of the root module (Net) that was not inspected",
    ]
    (step,) = verdict.next
    assert "torch.compile(model), instead of a function that calls it" in step


def test_a_log_without_room_for_names_alone_is_clean(make):
    """They name what was judged all the same."""
    bodies = make.finished(0, last={"records_lost": 5, "names_lost": 5})
    verdict = judge(make.hello(nproc=1), *bodies, make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("clean", "established")


def test_a_clean_run_says_which_compiled_code_nobody_looked_into(make):
    hidden = EventMessage(NotLookedInto(RunPosition(0), "model", "LlamaModel"))
    verdict = judge(make.hello(nproc=1), hidden, *make.finished(0), make.NodeBye("ok"))
    assert verdict.kind == "clean"
    assert verdict.statement.endswith("Compiled code inside `model` (LlamaModel) was not inspected.")
    assert "use_cache=False" in verdict.next[0]


def test_a_node_that_was_never_heard_keeps_a_run_from_being_clean(make):
    verdict = judge(make.hello(nproc=1, nodes=2), *make.finished(0), make.NodeBye("ok"))
    assert (verdict.kind, verdict.missing[0]) == ("unknown", "1 of 2 nodes was never heard from")


def test_ranks_that_lack_the_same_share_a_clause(make):
    bodies = [body for rank in range(4) for body in make.finished(rank, last={"pending": 2})]
    verdict = judge(make.hello(nproc=4), *bodies, make.NodeBye("ok"))
    assert verdict.missing == ["ranks 0-3 ended before 2 numbers had been read back from the device"]


def process(pid: int = 4242) -> int:
    return number_of_process(pid, "h0")


def test_a_process_that_is_no_rank_is_named_and_nothing_puts_it_before_a_rank(make):
    batch = leaf_origin(make, process())
    met = [*batch.messages(), make.ended(process(), 94)]
    verdict = judge(make.hello(nproc=0), *make.finished(0), *met, make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank, verdict.pid, verdict.module) == ("overflow", None, 4242, "fc2")
    assert verdict.statement.startswith("Process 4242 (no rank) on h0 overflowed first: ")
    both = judge(make.hello(nproc=0), *leaf_origin(make, 0, seq=9, batch=1).messages(), *met, make.NodeBye("failed"))
    assert both.statement.endswith("; concurrently, process 4242 (no rank) met a non-finite value elsewhere.")
    assert both.certainty == "supported"


def test_a_process_that_is_no_rank_is_looked_at_to_its_end_or_the_run_is_not_clean(make):
    ends = [*make.finished(0), *make.finished(process())]
    verdict = judge(make.hello(nproc=0), *ends, make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("clean", "established")
    assert "1 rank and 1 process that is not a rank" in verdict.statement
    lost = judge(make.hello(nproc=0), *make.finished(0), make.ended(process(), None, batch=3), make.NodeBye("ok"))
    assert lost.missing == ["process 4242 (no rank) was not heard from after batch 3"]


def test_a_process_that_is_no_rank_and_failed_is_named_where_no_rank_did(make):
    raised = [make.raised(process(), "ValueError", "boom"), make.ended(process(), 1)]
    verdict = judge(make.hello(nproc=0), *make.finished(0), *raised, make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank, verdict.pid, verdict.certainty) == ("crash", None, 4242, "established")
    assert verdict.statement == "Process 4242 (no rank) on h0 raised ValueError: boom."
    first = judge(make.hello(nproc=0), make.raised(0), make.ended(0, 1), *raised, make.NodeBye("failed"))
    assert (first.rank, first.pid) == (0, None)
    killed = judge(make.hello(nproc=0), *make.finished(0), make.ended(process(), -9), make.NodeBye("failed"))
    assert (killed.kind, killed.pid, killed.signal) == ("lost", 4242, "SIGKILL")


def test_a_process_that_could_not_be_watched_keeps_a_run_from_being_clean(make):
    bye = make.NodeBye("ok", unwatched=["process 4242 was not watched (no recorder: No space left on device)"])
    verdict = judge(make.hello(nproc=1), *make.finished(0), bye)
    assert (verdict.kind, verdict.missing) == ("unknown", bye.unwatched)


def test_a_process_that_has_become_a_rank_is_no_other_process(make):
    late = make.finished(process(), last={"pid": 77})
    verdict = judge(make.hello(nproc=0), *late, *make.finished(0, last={"pid": 77}), make.NodeBye("ok"))
    assert verdict.statement.startswith("No overflow: 1 rank, ")


def test_what_no_python_has_started_is_watched_by_gpuwatch_run(make):
    bodies = [make.ended(rank, 0, phase="unwatched") for rank in range(2)]
    verdict = judge(make.hello(), *bodies, make.NodeBye("ok"))
    assert verdict.kind == "unknown"
    assert "gpuwatch run -- torchrun" in verdict.next[0]
    assert judge(make.hello(), *make.finished(0), make.NodeBye("ok")).next == []


def test_a_script_without_any_module_is_unknown_and_that_is_what_is_missing(make):
    bodies = [body for rank in range(2) for body in make.finished(rank, batch=-1, page=-1)]
    verdict = judge(make.hello(), *bodies, make.NodeBye("ok"))
    assert (verdict.kind, verdict.missing) == ("unknown", ["ranks 0, 1 called no module"])
    assert verdict.statement == "Nothing was watched: no module was called on 2 ranks."

    bodies = [body for rank in range(2) for body in make.finished(rank, batch=-1, page=-1, step=7)]
    verdict = judge(make.hello(), *bodies, make.NodeBye("ok"))
    assert verdict.statement == "Only steps of optimizers were watched: no module was called on 2 ranks."


def test_clean_is_not_established_where_an_optimizer_stepped_on_what_no_module_has(make):
    loose = EventMessage(LooseParameters(RunPosition(1), "Adam", 2))
    verdict = judge(make.hello(), *make.finished(0), loose, *make.finished(1), make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("clean", "supported")
    told = "On rank 1 Adam updated 2 parameters that belong to no module that was called: "
    assert verdict.statement.endswith(f"{told}they were read after each step, and nowhere else.")


def test_clean_is_not_established_where_states_or_a_child_were_not_seen(make):
    unread = EventMessage(UnreadStates(RunPosition(1), "AdamW", 7))
    child = make.finished(0, last={"calling_child": 4242})
    verdict = judge(make.hello(), *child, unread, *make.finished(1), make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("clean", "supported")
    told = "On rank 1 what AdamW keeps in 16 bits or less was not read after its last 7 steps: it was freed before"
    assert verdict.statement.endswith(f"{told}, and 1 more.")
    verdict = judge(make.hello(), *child, *make.finished(1), make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("clean", "supported")
    assert verdict.statement.endswith("A child process (pid 4242) of rank 0 called modules and was not watched.")


def test_of_two_children_the_one_of_the_lower_rank_is_named_whoever_was_heard_first(make):
    first, second = (make.finished(rank, last={"calling_child": 4242}) for rank in range(2))
    verdicts = [judge(make.hello(), *order, make.NodeBye("ok")) for order in (first + second, second + first)]
    assert verdicts[0].statement == verdicts[1].statement
    assert "A child process (pid 4242) of rank 0 called" in verdicts[0].statement


def test_a_script_without_any_module_says_what_its_optimizer_stepped_on(make):
    loose = EventMessage(LooseParameters(RunPosition(0), "SGD", 1))
    verdict = judge(make.hello(nproc=1), loose, *make.finished(0, batch=-1, page=-1), make.NodeBye("ok"))
    assert verdict.kind == "unknown"
    assert "on rank 0 SGD updated 1 parameter that belongs to no module that was called" in verdict.evidence[-1]


def test_a_child_that_trained_unseen_keeps_a_run_from_being_clean(make):
    child = make.finished(1, last={"unseen_child": 4242})
    verdict = judge(make.hello(), *make.finished(0), *child, make.NodeBye("ok"))
    assert verdict.missing == ["rank 1 had a child process (pid 4242) that trained and was not watched"]


def test_a_rank_that_says_overflow_and_no_more_is_believed_and_no_module_is_named(make):
    verdict = judge(make.hello(), *make.finished(0), *make.finished(1, last={"overflow": True}), make.NodeBye("ok"))
    assert (verdict.kind, verdict.rank, verdict.module, verdict.certainty) == ("overflow", 1, None, "unknown")


def test_nobody_at_all_is_not_clean():
    assert decide(fold([])).kind == "unknown"


# -- preflight ----------------------------------------------------------------------------------------------------


def test_the_rank_that_failed_is_named_and_not_its_victims(make):
    verdict = judge(
        make.hello(host="alpha", nproc=3),
        make.preflight(0, "victim", "all_reduce", "waited for rank 2"),
        make.preflight(2, "failed", "device", "no memory"),
        make.preflight(1, "victim", "arrive", "waited for rank 2"),
        make.NodeBye("failed"),
    )
    assert (verdict.kind, verdict.rank, verdict.stage, verdict.certainty) == ("preflight", 2, "device", "established")
    assert verdict.statement == "Preflight, stage device: rank 2 on alpha failed: no memory."
    assert [c.rank for c in verdict.cascade] == [0, 1]


def test_victims_alone_name_nobody(make):
    verdict = judge(make.hello(), make.preflight(0, "victim"), make.preflight(1, "victim"), make.NodeBye("failed"))
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("preflight", None, "unknown")


def test_a_preflight_that_does_not_stop_the_job_is_not_the_verdict(make):
    bodies = [make.preflight(0, "failed", stops=False), *make.finished(0), make.NodeBye("ok")]
    assert judge(make.hello(nproc=1), *bodies).kind == "clean"


# -- any order, any duplicates, any rank missing ------------------------------------------------------------------

SCENARIOS = {
    "leaf": lambda make: [leaf_origin(make, 1, seq=3, batch=1), clean(make, 0, seq=3, batch=1), clean(make, 2, seq=3)],
    "concurrent": lambda make: [leaf_origin(make, 1, seq=3), leaf_origin(make, 2, seq=3), received(make, 0, seq=4)],
    "through a collective": lambda make: [
        leaf_origin(make, 1, seq=3),
        received(make, 0, seq=4),
        received(make, 2, seq=4),
    ],
    "weights": lambda make: [bad_weight(make, rank, seq=3) for rank in range(3)],
    "input": lambda make: [bad_input(make, 1, seq=3), received(make, 0, seq=4), clean(make, 2, seq=3)],
}
SOURCES = {"leaf": {1}, "concurrent": {1, 2}, "through a collective": {1}, "weights": set(), "input": {1}}


def messages_of(make, batches):
    """Rank r runs on node r % 2."""
    agents = ["a0", "a1"]
    found = [(agent, make.hello(agent, f"h{n}", 2 - n, 2)) for n, agent in enumerate(agents)]
    for batch in batches:
        agent = agents[batch.rank % 2]
        place = {"seq": batch.seq, "batch": batch.batch}
        found += [(agent, body) for body in batch.messages()]
        if batch.anomaly is not None:
            found.append((agent, make.raised(batch.rank, "OverflowDetected", "inf", **place)))
        found.append((agent, make.ended(batch.rank, 1, "itself" if batch.anomaly else "torchrun", **place)))
    found += [(agent, make.NodeBye("failed")) for agent in agents]
    return [(agent, 0, body) for agent, body in found]  # without a number: what is missing leaves no gap


@pytest.mark.slow
@given(st.sampled_from(sorted(SCENARIOS)), st.randoms(use_true_random=False), st.data())
def test_any_order_and_any_duplicates_give_the_same_verdict(make, name, dice: random.Random, data):
    messages = messages_of(make, SCENARIOS[name](make))
    expected = decide(fold(messages))
    again = [message for message in messages for _ in range(data.draw(st.integers(1, 3)))]
    dice.shuffle(again)
    assert decide(fold(again)) == expected


def rank_of(body) -> int | None:
    if isinstance(body, NameDefinitions | PageMessage):
        return body.rank
    if isinstance(body, EventMessage) and hasattr(body.event, "where"):
        return body.event.where.rank
    return None


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_a_missing_rank_never_makes_a_wrong_name_an_established_one(make, name, missing):
    messages = [m for m in messages_of(make, SCENARIOS[name](make)) if rank_of(m[2]) not in missing]
    verdict = decide(fold(messages))
    assert verdict.rank in SOURCES[name] or verdict.certainty != "established", verdict.statement


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_missing_pages_never_make_a_wrong_name_an_established_one(make, name):
    messages = messages_of(make, SCENARIOS[name](make))
    pages = [m for m in messages if isinstance(m[2], PageMessage)]
    for left_out in pages:
        verdict = decide(fold(m for m in messages if m is not left_out))
        assert verdict.rank in SOURCES[name] or verdict.certainty != "established", verdict.statement
    verdict = decide(fold(m for m in messages if m not in pages))
    assert verdict.certainty != "established"


# -- ranks that are alike, and the first step ---------------------------------------------------------------------


def test_where_all_ranks_are_alike_that_is_said(make):
    ranks = [leaf_origin(make, rank, batch=4, seq=9) for rank in range(3)]
    verdict = judge(make.hello(nproc=3), *(body for batch in ranks for body in batch.messages()))
    assert verdict.statement == "All 3 ranks overflowed alike: +inf in the output of `fc2` (Linear), forward, batch 4."
    assert any("look at what they share" in line for line in verdict.evidence)
    assert (verdict.certainty, len(verdict.concurrent)) == ("supported", 2)


def test_some_ranks_that_are_alike_are_named(make):
    ranks = [leaf_origin(make, 0, seq=9), leaf_origin(make, 2, seq=9), clean(make, 1, seq=9)]
    verdict = judge(make.hello(nproc=3), *(body for batch in ranks for body in batch.messages()))
    assert verdict.statement.startswith("Ranks 0 and 2 overflowed alike: ")
    assert not any("look at what they share" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    ("files", "path", "notes"),
    [
        ({0: CaptureFile("/r/overflow.pt"), 1: CaptureFile("/r/overflow-rank1.pt")}, "/r/overflow.pt", []),
        (
            {0: CaptureFile(refused="late"), 1: CaptureFile("/r/my overflow-rank1.pt")},
            "/r/my overflow-rank1.pt",
            ["of rank 1, which overflowed alike"],
        ),
        ({1: CaptureFile("/r/overflow.pt")}, "/r/overflow.pt", ["of rank 1, which overflowed alike"]),
        ({0: CaptureFile(refused="late")}, "", []),
        ({2: CaptureFile("/r/overflow.pt")}, None, None),
    ],
)
def test_the_capture_is_that_of_the_rank_or_of_one_that_is_alike(make, files, path, notes):
    ranks = [leaf_origin(make, 0, seq=9), leaf_origin(make, 1, seq=9), leaf_origin(make, 2, seq=9, module="other")]
    told = [EventMessage(ForwardCaptured(make.where(rank), file)) for rank, file in files.items()]
    verdict = judge(make.hello(nproc=3), *(body for batch in ranks for body in batch.messages()), *told)
    assert verdict.rank == 0
    capture = verdict.capture
    assert (capture and capture.path, capture and capture.notes) == (path, notes)
    commands = [step.partition("\n")[2] for step in verdict.next if "gpuwatch replay" in step]
    where = {"/r/overflow.pt": "/r", "/r/my overflow-rank1.pt": "'/r/my overflow-rank1.pt'"}
    assert commands == ([f"gpuwatch replay {where[path]}"] if path else [])


@pytest.mark.parametrize("told", ["nothing", "the second run", "a file", "it goes on"])
def test_a_rank_that_ended_before_its_second_run_says_so(make, told):
    """Another launcher may end it because another rank has met the value, too."""
    batch = leaf_origin(make, 1)
    batch.anomaly = msgspec.structs.replace(batch.anomaly, aborts=True, looks=True)
    more = {
        "the second run": [EventMessage(SecondRun(make.where(1), unknown="the model was changed"))],
        "a file": [EventMessage(ForwardCaptured(make.where(1), CaptureFile("/r/overflow.pt")))],
    }.get(told, [])
    end = [] if told == "it goes on" else make.broken_off(1, -15, by="torchrun")
    verdict = judge(make.hello(), *batch.messages(), *more, *end)
    why = [line for line in verdict.evidence if line.startswith("which operation made it is not known: ")]
    expected = {
        "nothing": "which operation made it is not known: rank 1 ended before that forward had run again",
        "the second run": "which operation made it is not known: the model was changed",
    }
    assert why == ([expected[told]] if told in expected else [])
    advice = [step for step in verdict.next if "gpuwatch launch --explain 0 --rank 1 train.py" in step]
    assert len(advice) == len(why)


def test_a_rank_that_met_something_else_at_the_same_time_is_not_said_to_have_met_the_same(make):
    left, right = leaf_origin(make, 0, seq=9), leaf_origin(make, 1, seq=9, module="other")
    statement = judge(make.hello(host="alpha"), *left.messages(), *right.messages()).statement
    assert statement == (
        "Rank 0 on alpha overflowed: +inf in the output of `fc2` (Linear), forward, batch 0; concurrently, rank 1 met "
        "a non-finite value elsewhere."
    )


def test_all_ranks_were_fed_the_same(make):
    ranks = [bad_input(make, rank, seq=2) for rank in range(2)]
    verdict = judge(make.hello(), *(body for batch in ranks for body in batch.messages()))
    assert verdict.statement.startswith("Both ranks were fed nan: ")


def never_initialised(make, number, **place):
    """`torch.empty` in front of the module that overflows."""
    batch = make.Batch(0, **place)
    x, h, y = batch.tensor(), batch.tensor(1e31), batch.tensor(make.INF)
    batch.call("fc1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor(number)})
    batch.call("fc2", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[y])
    return batch


def test_before_the_first_step_no_learning_rate_is_to_blame(make):
    verdict = judge(make.hello(nproc=1), *never_initialised(make, 1e31, batch=0, step=0).messages())
    told = " ".join([*verdict.evidence, *verdict.next])
    assert "learning rate" not in told
    assert "the largest weight up to that point: weight of `fc1` (Linear), abs max 1.00e+31" in verdict.evidence
    assert "look at the initialisation of the weight of `fc1` (Linear), or at the checkpoint." in verdict.next[0]
    assert "weight of `fc1` (Linear)" in verdict.next[0]
    ordinary = judge(make.hello(nproc=1), *never_initialised(make, 0.5, batch=0, step=0).messages())
    assert "learning rate" not in " ".join(ordinary.next)
    assert not any("largest weight" in line for line in ordinary.evidence)
    later = judge(make.hello(nproc=1), *never_initialised(make, 1e31, batch=9, step=9).messages())
    assert "learning rate" in " ".join(later.next)


def test_a_weight_that_was_bad_before_the_first_step_was_not_made_by_a_step(make):
    verdict = judge(make.hello(nproc=1), *bad_weight(make, 0, batch=0, step=0).messages())
    assert "step before" not in " ".join(verdict.next)
    assert "initialised" in verdict.next[0]


def test_a_rank_that_leaves_with_code_0_in_the_middle_of_a_forward_is_named(make):
    """`os._exit(0)`: torchrun sees a rank that ended well, and its peers lose the connection."""
    verdict = judge(
        make.hello(host="alpha"),
        make.ended(0, 0, phase="forward", module="layer.1", cls="Linear", step=6, batch=6, seq=12),
        make.raised(1, "RuntimeError", "Connection closed by peer", peer=True, seq=12),
        make.ended(1, 1, seq=12),
        make.NodeBye("failed"),
    )
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 0, "established")
    assert verdict.statement == (
        "Rank 0 on alpha exited with code 0 in the forward of batch 6, in `layer.1` (Linear), before its script had "
        "ended."
    )


@pytest.mark.parametrize(
    ("heard", "certainty"),
    [
        (lambda make: make.broken_off(0, 0, batch=4, last={"left": True}), "supported"),
        (
            lambda make: [EventMessage(LeftGroup(make.where(0, batch=4))), *make.broken_off(0, 1, batch=4)],
            "established",
        ),
    ],
    ids=["os._exit", "killed once it has left its group"],
)
def test_an_end_without_the_scripts_own_word_may_be_known(make, heard, certainty):
    verdict = judge(make.hello(nproc=1), *heard(make), make.NodeBye("ok"))
    assert (verdict.kind, verdict.certainty) == ("clean", certainty)


@pytest.mark.parametrize("same", [True, False])
def test_a_program_that_went_on_as_another_one_is_clean_if_that_was_watched(make, same):
    """It is an attempt of its own, of the same process. Another process is no proof of what the first one did."""
    bodies = [
        *make.broken_off(0, 0, phase="unwatched"),
        *make.finished(0, attempt=1, last={} if same else {"pid": 4242}),
    ]
    verdict = judge(make.hello(nproc=1), *bodies, make.NodeBye("ok"))
    lacking = "in attempt 0, rank 0 became another program (os.exec), which is not watched"
    assert (verdict.kind, verdict.missing) == (("clean", []) if same else ("unknown", [lacking]))


def test_a_run_with_a_rank_that_left_in_a_forward_is_not_clean(make):
    verdict = judge(
        make.hello(nproc=1),
        make.NodeBeat([make.state(0, phase="forward", final=True, hooks="attached")], {}),
        make.ended(0, 0, phase="forward", module="fc", cls="Linear", batch=2),
        make.NodeBye("ok"),
    )
    assert verdict.kind == "unknown"
    assert "exited with code 0 in the forward of batch 2" in verdict.statement
