"""In which order ranks ended, from the facts of their ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.ends.ending_order import ExitOrder, endings_of
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.rank_standing import GroupState, HeardSignal, StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ExitCall, GroupTeardown, ScriptError, ScriptExit
from gpuwatch.core.wire.messages import AgentBody, AgentHello, EventMessage, NodeBye

S = 10**9
NOON = 10**6 * S


@dataclass(frozen=True)
class End:
    """Of one rank; times are seconds after noon."""

    raised: str = ""
    message: str = "boom"
    peer: bool = False
    left_with: int | None = None
    """By sys.exit."""
    handler: int = 0
    """The signal whose handler called it."""
    told_s: float = 0.0
    """When a signal of its launcher's reached a handler; 0: never."""
    took_down: str = ""
    """What it handled when it took its process group down, and with `clock` and `at_s`."""
    code: int = 1
    by: str = "itself"
    clock: dict[str, int] = field(default_factory=dict)
    """What the rank itself says that it had issued."""
    begun: dict[str, int] = field(default_factory=dict)
    """What its table shows, in the group of all ranks and in others."""
    failed: bool = False
    """A collective has raised in it."""
    at_s: float = 0.0
    seen_s: tuple[float, float] = (0.0, 0.0)
    host: str = "h0"
    exits_at: str = ""
    """The function in which it called sys.exit or os._exit."""

    def bodies(self, rank: int) -> list[AgentBody]:
        seq = sum(self.clock.values()) if self.clock else -1
        own = RunPosition(rank, seq=seq, clock=self.clock, time_ns=NOON + round(self.at_s * S))
        groups = [
            GroupState(name, "0-2", 3, begun=count, at=count, phase="failed" if self.failed else "none")
            for name, count in self.begun.items()
        ]
        stale = RunPosition(rank, batch=3, seq=1)  # as it was at the last forward
        alive, ended = (NOON + round(each * S) for each in self.seen_s)
        heard = [HeardSignal(15, parent_ns=NOON + round(self.told_s * S))] if self.told_s else []
        times = {"alive_ns": alive, "ended_ns": ended}
        exit_ = WorkerExit(stale, self.code, self.by, "script", groups=groups, heard=heard, **times)
        said: list[AgentBody] = []
        if self.raised:
            said.append(EventMessage(ScriptError(own, self.raised, self.message, "Traceback", None, self.peer)))
        if self.left_with is not None:
            said.append(EventMessage(ScriptExit(own, self.left_with, handler=self.handler)))
        if self.exits_at:
            said.append(EventMessage(ExitCall(own, StackLine("/home/me/train.py", 84, self.exits_at))))
        if self.took_down:
            said.append(EventMessage(GroupTeardown(own, self.took_down, self.message, "Traceback", self.peer)))
        return [*said, EventMessage(exit_)]


def messages(ends: list[End]) -> list[tuple[str, int, AgentBody]]:
    hosts = sorted({end.host for end in ends})
    found: list[tuple[str, int, AgentBody]] = []
    for host in hosts:
        nproc = sum(end.host == host for end in ends)
        hello = AgentHello(host, host, nproc, len(hosts), len(hosts), command=["gpuwatch"], versions={}, rdzv_id="job")
        of_host = [body for rank, end in enumerate(ends) if end.host == host for body in end.bodies(rank)]
        found += [(host, number, body) for number, body in enumerate([hello, *of_host, NodeBye("failed")], 1)]
    return found


def endings(*ends: End) -> ExitOrder:
    return endings_of(fold(messages([*ends])), 0)


def judged(*ends: End) -> Verdict:
    return decide(fold(messages([*ends])))


RAISES = End("ValueError", clock={"0": 8}, begun={"0": 8}, at_s=1.0)
LOST_ITS_PEER = End("RuntimeError", peer=True, code=-6, clock={"0": 5}, at_s=1.2)


def test_fewer_collectives_are_earlier_whatever_the_numbers_of_other_groups_are():
    """A sum over groups is no clock: rank 1 has worked in a group of its own."""
    waits = End("ArithmeticError", clock={"0": 9}, at_s=1.001)
    busy = End("ValueError", clock={"0": 8, "1": 5}, at_s=1.0)
    assert (judged(waits, busy).rank, judged(waits, busy).certainty) == (1, "established")
    elsewhere = replace(waits, host="h1")
    assert (judged(elsewhere, busy).rank, judged(elsewhere, busy).certainty) == (1, "established")


def test_groups_of_which_each_had_issued_more_in_one_put_nobody_in_order():
    left = End("ValueError", clock={"0": 8, "1": 2})
    right = End("ValueError", clock={"0": 7, "1": 3}, host="h1")
    assert judged(left, right).certainty == "supported"


def test_of_one_host_the_clock_has_the_last_word_and_nothing_is_established_then():
    """Rank 0 has begun a collective more that it does not wait for, and rank 1 failed a second later."""
    ahead, behind = End("ValueError", clock={"0": 9}, at_s=1.0), End("KeyError", clock={"0": 8}, at_s=2.0)
    verdict = judged(ahead, behind)
    assert (verdict.rank, verdict.certainty) == (0, "supported")
    assert "rank 1 had issued fewer collectives, and ended at least 1000 ms later" in "".join(verdict.evidence)
    apart = judged(ahead, replace(behind, host="h1"))
    assert (apart.rank, apart.certainty) == (1, "established")


def test_what_a_process_showed_at_its_last_forward_is_not_compared_with_what_another_said():
    """It left by os._exit some collectives after that, because its peer was gone."""
    left = End(code=1, begun={"0": 9}, seen_s=(1.0, 1.05))
    assert judged(left, RAISES).rank == 1
    killed = End(code=-9, begun={"0": 8}, seen_s=(0.9, 0.95))
    wraps = End("ArithmeticError", clock={"0": 9}, begun={"0": 9}, at_s=1.0)
    assert (judged(wraps, killed).rank, judged(wraps, killed).certainty) == (1, "established")


def test_an_agent_may_see_late_that_a_rank_was_killed():
    killed = End(code=-9, begun={"0": 8}, seen_s=(1.07, 1.09))
    raises = End("ValueError", clock={"0": 9}, begun={"0": 9}, at_s=1.0)
    assert (judged(killed, raises).kind, judged(killed, raises).certainty) == ("lost", "established")
    long_after = judged(replace(killed, seen_s=(3.0, 3.1)), raises)
    assert (long_after.kind, long_after.certainty) == ("crash", "supported")


@pytest.mark.parametrize("hidden", [End(left_with=1), End(code=3)])
def test_an_exit_code_after_a_collective_has_raised_is_no_reason_of_ones_own(hidden: End):
    caught = replace(hidden, begun={"0": 4}, failed=True, at_s=0.5, seen_s=(0.5, 0.6))
    assert judged(caught, RAISES).rank == 1
    alone = judged(caught, End(code=-15, by="torchrun", begun={"0": 4}))
    assert (alone.kind, alone.rank, alone.certainty) == ("lost", None, "unknown")
    assert "after a collective had raised in it" in alone.evidence[0]
    ready = replace(caught, failed=False)
    assert (judged(ready, RAISES).rank, judged(ready, RAISES).kind) == (0, "crash")
    assert (
        judged(ready, RAISES).evidence[0]
        == "it reported no exception; its recorder says: outside of a forward, after batch 3"
    )
    assert "traceback" not in judged(ready, RAISES).next[0] and "traceback is above" in judged(RAISES).next[0]


def test_who_leaves_when_its_launcher_stops_it_was_not_first():
    told = End(left_with=1, by="torchrun", clock={"0": 7}, begun={"0": 7}, at_s=1.2)
    assert (judged(told, RAISES).rank, judged(told, RAISES).certainty) == (1, "established")
    before = replace(told, at_s=0.5)  # it was slow to leave
    assert judged(before, RAISES).rank == 0
    elsewhere = judged(replace(told, clock={"0": 8}, begun={"0": 8}, host="h1"), RAISES)
    assert (elsewhere.rank, elsewhere.certainty) == (1, "supported")
    assert judged(told, End(code=-15, by="torchrun")).rank == 0, "nobody else has a reason"


def test_who_was_aborted_when_its_script_had_ended_well_lost_its_peers():
    aborted = End(left_with=0, code=-6, begun={"0": 5}, seen_s=(1.3, 1.3))
    assert (judged(aborted, RAISES).kind, judged(aborted, RAISES).rank) == ("crash", 1)
    assert judged(aborted, End(code=-15, by="torchrun")).signal == "SIGABRT"


def test_all_that_ended_are_told_the_first_one_first():
    lost = End("RuntimeError", peer=True, clock={"0": 4}, at_s=0.2)
    second = End("KeyError", clock={"0": 8}, at_s=1.5)
    found = endings(lost, second, RAISES)
    assert [rank.rank for rank in found.by_themselves] == [2, 1, 0]
    assert found.first is not None
    assert [(rank.rank, ns) for rank, ns in found.later] == [(1, S // 2)]


def test_an_abort_at_the_exit_of_a_rank_that_has_raised_makes_that_no_less_sure():
    """pytorch/pytorch#179291: it comes after the exception."""
    verdict = judged(replace(RAISES, code=-6), LOST_ITS_PEER)
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 0, "established")


def test_what_a_script_said_is_its_end_though_its_launcher_cuts_its_teardown_short():
    """Rank 1 called sys.exit, and rank 0 lost it and was aborted: torchrun then sent SIGTERM to rank 1."""
    exited = End(left_with=1, code=-15, by="torchrun", clock={"0": 4}, at_s=1.0)
    lost = LOST_ITS_PEER
    verdict = judged(lost, exited)
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "established")
    apart = replace(exited, host="h1")
    assert judged(lost, apart).rank == 1, "it had issued fewer collectives"
    assert judged(lost, replace(apart, clock={"0": 5})).rank is None, "what put them in order?"
    assert judged(lost, replace(exited, at_s=1.3)).rank is None, "torchrun stops it for rank 0"
    assert judged(replace(RAISES, at_s=0.9), exited).rank == 0, "it was told to end"
    twice = judged(lost, exited, replace(exited, at_s=1.05))
    assert (twice.rank, twice.certainty) == (1, "supported")


@pytest.mark.parametrize("told", [{"handler": 15}, {"told_s": 0.9}])
def test_a_script_that_left_for_a_signal_of_its_launcher_and_was_killed_then_has_no_end_of_its_own(told):
    """Its launcher sends SIGKILL to what is slow to leave."""
    exited = End(left_with=1, code=-9, by="torchrun", clock={"0": 4}, at_s=1.0, **told)
    assert judged(LOST_ITS_PEER, exited).rank is None


def test_who_took_its_group_down_while_it_handled_an_exception_is_what_the_others_lost():
    """torchrun stopped it before its script had ended."""
    left = End(took_down="OSError", code=-15, by="torchrun", clock={"0": 4}, at_s=1.0)
    verdict = judged(LOST_ITS_PEER, left, End(code=-15, by="torchrun"))
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 1, "supported")
    assert verdict.statement == (
        "Rank 1 on h0 took its process group down while it handled OSError: boom, "
        "and rank 0 could not go on without it."
    )
    both = judged(LOST_ITS_PEER, left, left)
    assert both.statement.startswith("Rank 1 (and rank 2) on h0 took its process group down")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"at_s": 1.3}, "it did so after rank 0 had lost its peer"),
        ({"clock": {"0": 5}}, "it was in the same collective"),
        ({"peer": True}, "it had lost a peer itself"),
    ],
)
def test_a_group_that_was_taken_down_names_nobody_where_something_else_may_have_come_first(change, why):
    left = replace(End(took_down="OSError", code=-15, by="torchrun", clock={"0": 4}, at_s=1.0), **change)
    assert judged(LOST_ITS_PEER, left).certainty == "unknown", why


def test_what_its_launcher_ended_is_never_first():
    """Rank 1 has raised because it could not connect: torchrun then sent SIGTERM to rank 0."""
    lost = End("DistNetworkError", peer=True, at_s=1.0, seen_s=(1.0, 1.1))
    ended = End(code=-15, by="torchrun", left_with=-15, at_s=1.2, seen_s=(1.2, 1.3))
    verdict = judged(ended, lost)
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("lost", None, "unknown")
    assert "rank 1" in verdict.evidence[0]
    told = judged(End("SystemExit", code=1, by="torchrun", at_s=1.2), lost)
    assert (told.rank, told.certainty) == (None, "unknown")
    before = judged(End("ValueError", code=1, by="torchrun", at_s=0.5), lost)
    assert before.rank == 0, "it was slow to leave"


@pytest.mark.parametrize(
    ("other", "ms", "who"),
    [
        ("ValueError", 5, "Rank 0 (and rank 1 at the same point)"),
        ("ValueError", 13, "Rank 0 (and rank 1 at the same point)"),
        ("ValueError", 990, "Rank 0 (and rank 1 at the same point)"),
        ("ValueError", 1010, "Rank 0"),
        ("KeyError", 13, "Rank 0"),
    ],
)
def test_ranks_that_raise_the_same_within_a_second_are_named_together(other: str, ms: int, who: str):
    first, second = replace(RAISES, message="row 3 of 8"), replace(RAISES, raised=other, message="row 7 of 8")
    verdict = judged(first, replace(second, at_s=RAISES.at_s + ms / 1000))
    assert verdict.statement.startswith(f"{who} on h0 raised ValueError: row 3 of 8")
    assert verdict.certainty == "supported"


def test_what_torchrun_raised_itself_is_the_reason_where_no_rank_has_one():
    error = "DistNetworkError: The server socket has failed to listen: port 29500, EADDRINUSE"
    hello = AgentHello("h0", "h0", 2, 1, 1, command=["gpuwatch"], versions={}, rdzv_id="job")
    verdict = decide(fold([("h0", 1, hello), ("h0", 2, NodeBye("failed", error=error))]))
    assert (verdict.kind, verdict.certainty) == ("crash", "supported")
    said = "DistNetworkError: The server socket has failed to listen: port 29500, EADDRINUSE"
    assert verdict.statement == f"torchrun failed by itself: {said}."
    assert "--master-port" in verdict.next[0]


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (End(code=3, left_with=3, exits_at="check"), "ended with exit code 3 at train.py:84 in check."),
        (End(code=3, exits_at="check"), "ended with exit code 3 at train.py:84 in check."),
        (End(code=3, left_with=3), "ended with exit code 3."),
        (End(code=255, left_with=-1, exits_at="check"), "ended with exit code 255 at train.py:84 in check."),
        (End(code=9, left_with=3, exits_at="bye"), "ended with exit code 9 at train.py:84 in bye."),
    ],
    ids=["sys.exit", "os._exit", "unknown", "as the system has it", "os._exit in an exit handler"],
)
def test_an_exit_code_comes_with_the_line_that_left_where_it_is_known(end, says):
    verdict = judged(End(peer=True, raised="RuntimeError", code=1, clock={"0": 9}, at_s=1.1), end)

    assert (verdict.kind, verdict.rank) == ("crash", 1)
    assert verdict.statement.endswith(says)
    line = f"The script ends this rank itself at train.py:84 in {end.exits_at}: look"
    begins = line if end.exits_at else "Look at what this rank"
    assert verdict.next[0].startswith(begins)


def test_a_rank_that_left_early_by_os_exit_is_told_with_the_line():
    left = End(code=0, clock={"0": 4}, begun={"0": 4}, exits_at="leave")
    verdict = judged(End("RuntimeError", peer=True, code=1, clock={"0": 5}, begun={"0": 5}, failed=True), left)

    assert verdict.statement.startswith(
        "Rank 1 on h0 left early: its process ended with exit code 0 at train.py:84 in "
    )
    assert verdict.next[0].startswith("The script ends this rank itself at train.py:84 in leave")


def test_of_two_calls_that_end_a_rank_the_later_one_counts():
    """`finally: os._exit(4)` around a sys.exit(3)."""
    first, last = (
        EventMessage(ExitCall(RunPosition(0, time_ns=NOON + n), StackLine("/t.py", 1, name)))
        for n, name in enumerate(("first", "last"))
    )
    hello = messages([End()])[0]
    for said in ([first, last], [last, first]):
        facts = fold([hello, *(("h0", number, body) for number, body in enumerate(said, 2))])
        assert facts.one(0, 0).exit_call.line.function == "last"
