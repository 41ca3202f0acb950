"""Who the others wait for, from where the ranks stood. The stacks are those of real ranks (tests/e2e/test_hangs.py)."""

from __future__ import annotations

import itertools

import pytest
from gpuwatch.collector.ends.hang_finding import find_hang
from gpuwatch.core.events.agent_events import RankLook, WorkerExit
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation, StackLine
from gpuwatch.core.events.run_position import RunPosition
from msgspec.structs import replace

TORCH = "/site-packages/torch"
MAIN = StackLine("/home/me/train.py", 60, "main", "main()")
IN_ALL_REDUCE = [
    StackLine(f"{TORCH}/distributed/distributed_c10d.py", 3007, "all_reduce", "work.wait()"),
    StackLine(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper", "return func(*args, **kwargs)"),
    StackLine("/home/me/train.py", 41, "step", "dist.all_reduce(loss)"),
    MAIN,
]
IN_BROADCAST = [
    StackLine(f"{TORCH}/distributed/distributed_c10d.py", 2871, "broadcast", "work.wait()"),
    StackLine("/home/me/train.py", 52, "share", "dist.broadcast(x, 0)"),
    MAIN,
]
IN_BACKWARD = [
    StackLine(
        f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward", "return Variable._execution_engine.run_backward("
    ),
    StackLine(f"{TORCH}/_tensor.py", 623, "backward", "torch.autograd.backward("),
    StackLine("/home/me/train.py", 40, "step", "loss.backward()"),
    MAIN,
]
IN_WAIT = [StackLine("/home/me/train.py", 44, "step", "work.wait()"), MAIN]
LOADING = [StackLine("/home/me/data.py", 7, "load", "time.sleep(1)"), MAIN]


def look(rank, stack, *, state="S", busy=0.0, phase="script", still_s=300.0, module=None, groups=()):
    cls = "Net" if module else None
    return RankLook(RunPosition(rank, batch=4), 1, still_s, phase, module, cls, state, busy, stack, list(groups))


def table(begun, *waits_in, name="0", members="0-1"):
    """Of one group; it waits in its last operation, if there is one."""
    recent = [IssuedOperation(begun - n, operation, "float32", 8) for n, operation in enumerate(reversed(waits_in))]
    phase, ended = ("waiting", begun - 1) if waits_in else ("none", begun)
    return GroupState(name, members, 2, begun, ended, phase, begun, 300.0, recent)


def left(rank, code=0):
    return {rank: WorkerExit(RunPosition(rank, batch=3), code, "itself", "finished")}


def find(*looks, ended=(), world=None):
    exits = dict(ended)
    return find_hang(looks, exits, world if world is not None else len(looks) + len(exits))


def test_the_only_rank_that_is_elsewhere_did_not_come():
    found = find(look(0, IN_ALL_REDUCE), look(1, LOADING), look(2, IN_ALL_REDUCE))

    assert (found.rank, found.certainty, found.others) == (1, "established", [])
    assert found.statement == (
        "Rank 1 is at data.py:7 in load, after batch 4: time.sleep(1). "
        "It never reached all_reduce, in which ranks 0, 2 have waited for 300 s."
    )
    assert found.evidence == [
        "ranks 0, 2 wait in all_reduce: train.py:41 in step: dist.all_reduce(loss)",
        "rank 1 is outside of a forward, after batch 4: data.py:7 in load: time.sleep(1)",
    ]


@pytest.mark.parametrize("busy", [0.0, 1.0])
def test_a_rank_that_computes_or_sleeps_while_others_wait_is_named_alike(busy):
    assert find(look(0, IN_ALL_REDUCE), look(1, LOADING, busy=busy)).rank == 1


def test_a_backward_that_uses_no_processor_seems_to_wait_and_is_not_proof():
    found = find(look(0, IN_BACKWARD, phase="backward"), look(1, LOADING), look(2, IN_BACKWARD, phase="backward"))

    assert (found.rank, found.certainty) == (1, "supported")
    assert "ranks 0, 2 seem to wait in the backward's reduction of gradients" in found.evidence[0]


def test_an_import_of_torchs_own_modules_is_no_wait():
    """As it was met on a slow machine."""
    importing = [
        StackLine(f"{TORCH}/distributed/tensor/_ops/_pointwise_ops.py", 567, "_get_pointwise_ops_from_tag", "if torch"),
        StackLine("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
        MAIN,
    ]
    logging = [StackLine(f"{TORCH}/distributed/c10d_logger.py", 9, "<module>"), *importing[1:]]
    assert find(look(0, importing), look(1, LOADING)).rank is None
    assert find(look(0, logging), look(1, LOADING)).rank is None


def test_a_collective_that_torch_issues_without_a_function_in_python_is_a_wait():
    syncing = [StackLine(f"{TORCH}/nn/parallel/distributed.py", 2120, "_sync_module_states"), MAIN]
    assert find(look(0, syncing), look(1, LOADING)).rank == 1
    assert find(look(0, syncing, busy=0.9, state="R"), look(1, LOADING)) is None


def test_a_backward_that_computes_does_not_wait():
    found = find(look(0, IN_ALL_REDUCE), look(1, IN_BACKWARD, busy=0.98, phase="backward"))

    assert (found.rank, found.certainty) == (1, "established")
    assert "Rank 1 is at train.py:40 in step, in the backward of batch 4: loss.backward()." in found.statement


def test_a_stopped_rank_is_told_as_stopped():
    found = find(look(0, IN_ALL_REDUCE), look(1, [], state="T"))

    assert (found.rank, found.certainty) == (1, "established")
    assert "Rank 1 is stopped (by SIGSTOP, Ctrl-Z or a debugger)" in found.statement


def test_all_ranks_stopped_is_somebody_at_work():
    assert find(look(0, [], state="T"), look(1, [], state="T")) is None


def test_a_stopped_rank_for_which_the_others_have_given_up_is_named():
    """Their group's timeout has raised in them; a rank that Linux has stopped cannot be asked."""
    found = find(look(0, [], phase="raised"), look(1, [], state="T"))

    assert (found.rank, found.certainty, found.cause) == (1, "supported", "stopped")
    assert found.statement == (
        "Rank 1 is stopped (by SIGSTOP or Ctrl-Z), outside of a forward, after batch 4: it can do nothing until "
        "SIGCONT, and no other rank goes on without it."
    )
    several = find(look(0, [], phase="raised"), look(1, [], state="T"), look(2, [], state="T"))
    assert several.ranks == [1, 2]


@pytest.mark.parametrize("code", [1, -6])
def test_a_stopped_rank_whose_peers_have_failed_is_named(code):
    """On another node, torchrun has ended them and gone; this one waits for its own rank."""
    found = find(look(1, [], state="T"), ended=left(0, code))

    assert (found.rank, found.cause) == (1, "stopped")


@pytest.mark.parametrize(
    ("looks", "ended"),
    [
        ([look(0, LOADING), look(1, [], state="T")], {}),
        ([look(0, [], phase="raised"), look(1, [], state="t")], {}),
        ([look(1, [], state="t")], left(0, 1)),
        ([look(1, [], state="T")], left(0)),
    ],
    ids=["another may be elsewhere", "a debugger has it", "that alone", "its peers have ended well"],
)
def test_a_stopped_rank_need_not_be_the_reason(looks, ended):
    found = find(*looks, ended=ended)
    assert found is None or found.rank is None


def test_a_rank_without_a_stack_is_no_proof():
    found = find(look(0, IN_ALL_REDUCE), look(1, []))

    assert (found.rank, found.certainty) == (1, "supported")


def test_several_that_did_not_come_are_all_told():
    found = find(*(look(rank, IN_ALL_REDUCE) for rank in (0, 3)), look(1, LOADING), look(2, LOADING))

    assert (found.rank, found.certainty, found.others) == (None, "supported", [1, 2])
    assert found.statement == (
        "Ranks 1, 2 are at data.py:7 in load, after batch 4: time.sleep(1). "
        "They never reached all_reduce, in which ranks 0, 3 have waited for 300 s."
    )


def test_those_that_did_not_come_and_are_at_different_lines_have_theirs_too():
    saving = [StackLine("/home/me/save.py", 3, "save", "upload()"), MAIN]
    found = find(look(0, IN_ALL_REDUCE), look(1, LOADING), look(2, saving))
    assert found.statement.startswith("Ranks 1, 2 are at data.py:7 and save.py:3. They never reached all_reduce")

    more = [StackLine("/home/me/more.py", 5, "more", "upload()"), MAIN]
    found = find(look(0, IN_ALL_REDUCE), look(1, LOADING), look(2, saving), look(3, more))
    assert found.statement.startswith("Ranks 1-3 never reached all_reduce")


def test_the_first_two_lines_of_a_terminal_hold_who_waits_for_whom_and_the_line():
    """The code of a long line comes below, with the other lines."""
    code = "state = broadcast_of_all(self.optimizer.state_dict(), source=0, group=self.groups.data_parallel)"
    long = [StackLine("/home/me/pretraining/checkpoints.py", 1041, "evaluate_and_save_and_upload", code), MAIN]
    found = find(look(0, IN_BACKWARD, phase="backward"), look(1, long))

    first = f"gpuwatch: {found.statement}"[: 2 * 80]
    assert "checkpoints.py:1041" in first
    assert "in which rank 0 " in first
    assert found.evidence[1].endswith(code)


def test_a_stopped_rank_is_told_so_whatever_has_room():
    stopped = replace(look(1, LOADING, state="T"), after="optimizer")
    found = find(look(0, IN_BACKWARD, phase="backward"), stopped)

    begins = (
        "Rank 1 is stopped (by SIGSTOP, Ctrl-Z or a debugger). It never reached the backward's reduction of gradients"
    )
    assert found.statement.startswith(begins)
    assert "after the optimizer step of batch 4" not in found.statement, "there is no room for it"
    assert "rank 1 is stopped, after the optimizer step of batch 4: " in found.evidence[1]


def test_a_rank_that_has_left_while_others_wait():
    found = find(look(0, IN_ALL_REDUCE), look(2, IN_ALL_REDUCE), ended=left(1))

    assert (found.rank, found.certainty) == (1, "established")
    assert "left early: its script ended with exit code 0, while ranks 0, 2 have waited for 300 s" in found.statement


def test_the_last_living_rank_that_stands_still_is_named_and_may_be_ended():
    found = find(look(1, LOADING), ended={**left(0), **left(2)})

    assert (found.rank, found.certainty, found.may_end, found.outlook.kind) == (1, "established", True, "may go on")
    assert found.statement == (
        "Rank 1 has not moved for 300 s, and all other ranks have ended. "
        "It is at data.py:7 in load, after batch 4: time.sleep(1)."
    )


def test_the_last_living_rank_is_not_known_to_be_the_last_one_where_a_rank_was_not_seen():
    found = find(look(1, LOADING), ended=left(0), world=3)

    assert (found.rank, found.certainty, found.may_end) == (None, "unknown", False)


def test_the_last_living_rank_is_not_named_where_another_one_failed():
    assert find(look(1, LOADING), ended=left(0, code=1)).rank is None


def test_the_only_rank_of_a_job_is_not_ended():
    assert find(look(0, LOADING)).may_end is False


def test_a_rank_that_raised_because_another_had_left_is_not_the_one_that_did_not_come():
    """On a loaded machine: rank 0 leaves, rank 1 has lost the connection to it, ranks 2 and 3 do so in a moment."""
    found = find(
        look(0, [], phase="finished"),
        look(1, [], phase="raised"),
        look(2, IN_ALL_REDUCE),
        look(3, IN_ALL_REDUCE),
        world=5,
    )
    assert (found.rank, found.certainty, found.others) == (0, "supported", [])


def test_a_rank_that_was_never_seen_leaves_the_others_without_a_culprit():
    found = find(look(0, IN_ALL_REDUCE), look(2, IN_ALL_REDUCE), world=3)

    assert (found.rank, found.certainty) == (None, "unknown")
    assert "1 of the ranks did not report their positions" in found.statement


def test_a_rank_that_was_never_seen_keeps_the_one_that_is_elsewhere_from_being_sure():
    assert find(look(0, IN_ALL_REDUCE), look(2, LOADING), world=3).certainty == "supported"


def test_all_came_names_nobody():
    found = find(*(look(rank, IN_ALL_REDUCE) for rank in range(4)))

    assert (found.rank, found.certainty, found.others) == (None, "unknown", [])
    assert "All 4 ranks have reached all_reduce" in found.statement


def test_one_that_waits_in_another_operation_than_all_others():
    found = find(*(look(rank, IN_ALL_REDUCE) for rank in (0, 1, 3)), look(2, IN_BROADCAST))

    assert (found.rank, found.certainty) == (2, "supported")
    where = "Rank 2 waits in broadcast at train.py:52, where 3 other ranks wait in all_reduce at train.py:41"
    assert where in found.statement


def test_of_two_that_wait_in_different_operations_neither_is_the_odd_one():
    found = find(look(0, IN_ALL_REDUCE), look(1, IN_BROADCAST))

    assert (found.rank, found.certainty) == (None, "unknown")


def test_a_wait_for_an_operation_that_is_not_seen_names_nobody():
    found = find(look(0, IN_ALL_REDUCE), look(1, IN_ALL_REDUCE), look(2, IN_WAIT))

    assert (found.rank, found.certainty) == (None, "unknown")


def test_a_pipelines_wait_is_for_a_send_or_a_receive():
    """It has begun several, and waits for an earlier one than the last."""
    last = IssuedOperation(-34, "send", "float32", 64, 1)
    groups = [GroupState("0", "0-1", 2, 0, 0, "waiting", -31, 300.0, [last])]
    found = find(look(0, IN_WAIT, groups=groups), look(1, LOADING))
    assert (found.rank, found.certainty) == (1, "established")
    assert "It never reached a send or a receive, in which rank 0 has waited" in found.statement
    found = find(look(0, IN_ALL_REDUCE), look(1, IN_ALL_REDUCE), look(2, IN_WAIT, groups=groups))
    assert (found.rank, found.certainty) == (None, "unknown")


def test_on_a_gpu_a_rank_waits_where_it_asks_its_device():
    at_item = [StackLine("/home/me/train.py", 45, "step", "total += loss.item()"), MAIN]
    found = find(look(0, at_item, busy=1.0), look(1, LOADING), look(2, at_item, busy=1.0))
    assert (found.rank, found.certainty) == (1, "supported")

    found = find(*(look(rank, at_item, busy=1.0) for rank in range(3)))
    assert (found.rank, found.certainty) == (None, "unknown")
    assert "gpuwatch cannot see in which collective a GPU is" in found.statement


def test_ranks_that_compute_and_wait_for_nobody_are_no_hang():
    assert find(look(0, LOADING, busy=1.0), look(1, LOADING, busy=0.9)) is None
    assert find(look(0, LOADING, busy=1.0)) is None


@pytest.mark.parametrize(("phase", "may_end"), [("finished", False), ("raised", True)])
def test_a_rank_that_does_not_end(phase, may_end):
    held = [StackLine("/usr/lib/python3.11/threading.py", 1590, "_shutdown", "lock.acquire()")]
    found = find(look(1, held, phase=phase), ended=left(0) | left(2), world=3)

    assert (found.rank, found.certainty, found.may_end) == (1, "established", may_end)
    assert found.statement.startswith("Rank 1 has not exited for 300 s since its script")


@pytest.mark.parametrize(
    ("looks", "kind", "free"),
    [
        ([look(0, IN_ALL_REDUCE), look(1, LOADING)], "may go on", [1]),
        ([look(0, IN_ALL_REDUCE), look(1, LOADING, busy=1.0)], "may go on", [1]),
        ([look(0, IN_ALL_REDUCE), look(1, IN_WAIT)], "may go on", [1]),  # of what, its table does not show
        ([look(0, IN_ALL_REDUCE), look(1, [])], "may go on", [1]),
        ([look(0, IN_ALL_REDUCE), look(1, [], state="t")], "may go on", [1]),  # a debugger
        ([look(0, IN_ALL_REDUCE), look(1, LOADING, phase="finished")], "may go on", [1]),
        ([look(0, IN_ALL_REDUCE), look(1, LOADING, phase="raised")], "all wait", []),
        ([look(0, IN_ALL_REDUCE), look(1, IN_ALL_REDUCE, busy=1.0)], "may go on", [1]),  # it packs what it sends
        ([look(0, IN_ALL_REDUCE), look(1, IN_ALL_REDUCE)], "all wait", []),
        ([look(0, IN_ALL_REDUCE), look(1, IN_BROADCAST)], "all wait", []),
        ([look(0, IN_ALL_REDUCE), look(1, IN_BACKWARD)], "all wait", []),
        ([look(0, IN_BACKWARD), look(1, IN_BACKWARD, busy=1.0)], "may go on", [1]),
    ],
)
def test_a_job_may_go_on_as_long_as_a_rank_stands_in_code_of_its_own(looks, kind, free):
    found = find(*looks)

    assert (found.outlook.kind, found.outlook.free) == (kind, free)


IN_ANOTHER_GROUP = [table(3), table(1, "all_reduce", name="1")]


@pytest.mark.parametrize(
    ("looks", "ended", "cause", "kind"),
    [
        (
            [
                look(0, IN_ALL_REDUCE, groups=[table(4, "all_reduce")]),
                look(1, IN_BROADCAST, groups=[table(4, "broadcast")]),
            ],
            {},
            "mismatch",
            "cannot go on",
        ),
        (
            [
                look(0, IN_ALL_REDUCE, groups=[table(4, "all_reduce"), table(0, name="1")]),
                look(1, IN_ALL_REDUCE, groups=IN_ANOTHER_GROUP),
            ],
            {},
            "order",
            "all wait",
        ),
        (
            [look(0, IN_ALL_REDUCE, groups=[table(4, "all_reduce")]), look(1, [], state="T", groups=[table(3)])],
            {},
            "did not come",
            "cannot go on",
        ),
        ([look(0, IN_ALL_REDUCE, groups=[table(4, "all_reduce")])], left(1), "left early", "cannot go on"),
        (
            [look(rank, IN_ALL_REDUCE, groups=[table(4, "all_reduce")]) for rank in range(2)],
            {},
            "all came",
            "all wait",
        ),
        (
            [
                look(0, IN_ALL_REDUCE, groups=[table(4, "all_reduce")]),
                look(1, LOADING, groups=[table(4, "broadcast")]),  # it has issued that and works
            ],
            {},
            "mismatch",
            "may go on",
        ),
    ],
)
def test_what_cannot_go_on_is_shown_by_the_tables_of_all_ranks(looks, ended, cause, kind):
    found = find(*looks, ended=ended)

    assert (found.cause, found.outlook.kind) == (cause, kind)


def test_a_job_of_which_a_node_is_not_seen_may_go_on():
    found = find(look(0, IN_ALL_REDUCE), world=2)

    assert (found.outlook.kind, found.outlook.free) == ("may go on", [])


def test_what_computes_on_a_gpu_may_go_on():
    at_item = [StackLine("/home/me/train.py", 45, "step", "total += loss.item()"), MAIN]

    assert find(look(0, at_item), look(1, at_item)).outlook.kind == "may go on"


def test_ranks_that_rest_and_wait_for_nobody():
    assert find(look(0, LOADING), look(1, LOADING)).rank is None
    assert find(look(0, LOADING)).rank == 0


def test_nobody_seen_is_nothing_to_say():
    assert find(world=2) is None


def test_the_order_in_which_ranks_tell_changes_nothing():
    looks = [look(0, IN_ALL_REDUCE), look(1, LOADING), look(2, IN_BACKWARD), look(3, [], state="T")]

    assert len({repr(find(*order)) for order in itertools.permutations(looks)}) == 1


# Over NCCL: the host has gone on, and its device waits.

LOOPING = [StackLine("/home/me/train.py", 45, "step", "sums += value * 2"), MAIN]


def pending(number=9, begun=9, name="0", **fields):
    recent = [IssuedOperation(number, "all_reduce", "float32", 8)]
    return GroupState(
        name, "0-2", 3, begun, max(0, number - 1), recent=recent, pending=number, pending_s=300.0, **fields
    )


def done(begun=8, name="0"):
    return GroupState(name, "0-2", 3, begun, begun, pending=0)


@pytest.mark.parametrize("line", ["x.to('cpu')", "if loss > 3:", "print(loss)", "float(loss)", "torch.nonzero(x)"])
@pytest.mark.parametrize(("state", "busy"), [("S", 0.0), ("R", 1.0)], ids=["rests", "spins"])
def test_a_device_says_in_which_collective_its_host_waits(line, state, busy):
    stack = [StackLine("/home/me/train.py", 44, "step", line), MAIN]
    waits = [look(rank, stack, groups=[pending()], state=state, busy=busy) for rank in (0, 2)]
    found = find(*waits, look(1, LOADING, groups=[done()]))

    assert (found.rank, found.certainty, found.cause) == (1, "established", "did not come")
    assert found.statement.endswith("It never reached all_reduce, in which ranks 0, 2 have waited for 300 s.")
    assert found.evidence[0].startswith(
        "ranks 0, 2 wait in a call that synchronizes with the device, which is in all_reduce: train.py:44"
    )
    assert (found.outlook.kind, found.outlook.free) == ("may go on", [1])


def test_a_host_that_does_something_else_has_a_device_that_waits():
    found = find(
        look(0, LOADING, groups=[pending()]),
        look(1, LOADING, groups=[done()]),
        look(2, LOOPING, busy=1.0, groups=[pending()]),
    )

    assert (found.rank, found.certainty) == (1, "established")
    assert found.outlook.free == [0, 1, 2]


def test_a_rank_whose_process_is_gone_has_left():
    stack = [StackLine("/home/me/train.py", 44, "step", "x.item()"), MAIN]
    waits = [look(rank, stack, groups=[pending()]) for rank in (0, 2)]
    found = find(*waits, look(1, [], state="", phase="finished", groups=[done()]))

    assert (found.rank, found.certainty, found.cause) == (1, "established", "left early")
    assert found.outlook.kind == "cannot go on"


def test_a_rank_whose_torch_did_not_answer_may_have_begun_more():
    """C++ begins collectives that its table has not counted yet."""
    stack = [StackLine("/home/me/train.py", 44, "step", "x.item()"), MAIN]
    waits = [look(rank, stack, groups=[pending()]) for rank in (0, 2)]
    stopped = look(1, [], state="T", groups=[GroupState("0", "0-2", 3, 8, 8)])

    assert (find(*waits, stopped).rank, find(*waits, stopped).certainty) == (1, "supported")


def test_devices_that_all_have_reached_it_blame_nobody():
    stack = [StackLine("/home/me/train.py", 44, "step", "x.item()"), MAIN]
    found = find(*(look(rank, stack, groups=[pending()]) for rank in range(3)))

    assert (found.rank, found.certainty, found.cause) == (None, "unknown", "all came")


def test_a_host_that_waits_over_another_backend_comes_before_its_device():
    gloo = table(3, "broadcast", name="1", members="0-2")
    found = find(
        look(0, IN_BROADCAST, groups=[pending(), gloo]),
        look(1, LOADING, groups=[done(), table(2, name="1", members="0-2")]),
        look(2, IN_BROADCAST, groups=[pending(), gloo]),
    )

    assert found.rank == 1
    assert "broadcast" in found.statement


# Over NCCL without its recorder, where the ranks' tables note all that is issued (torch 2.14, the backend nccl2).

AT_TO = [StackLine("/home/me/train.py", 44, "step", "x.to('cpu')"), MAIN]


def given(begun=9):
    recent = [IssuedOperation(number, "all_reduce", "float32", 8) for number in range(begun - 3, begun + 1)]
    return GroupState("0", "0-2", 3, begun, 0, "on_device", begun, 300.0, recent)


@pytest.mark.parametrize("others", [(9, 9), (12, 10)], ids=["in the same", "further"])
def test_a_device_stands_at_the_first_collective_that_a_member_never_began(others):
    waits = [look(rank, AT_TO, groups=[given(begun)]) for rank, begun in zip((0, 2), others, strict=True)]
    found = find(*waits, look(1, LOADING, groups=[given(8)]))

    assert (found.rank, found.certainty, found.cause) == (1, "established", "did not come")
    assert found.statement.endswith("It never reached all_reduce, in which ranks 0, 2 have waited for 300 s.")
    assert found.evidence[-1].startswith("ranks 0, 2 have begun collective 9 and not finished it: all_reduce")
    assert found.outlook.free == [1]


def test_a_device_may_have_completed_what_all_have_begun():
    found = find(*(look(rank, stack, groups=[given(9)]) for rank, stack in enumerate((AT_TO, LOADING, AT_TO))))

    assert (found.rank, found.certainty) == (None, "unknown")


def test_of_a_rank_without_a_table_nothing_follows_for_a_device():
    found = find(look(0, AT_TO, groups=[given(9)]), look(1, LOADING), look(2, AT_TO, groups=[given(9)]))

    assert (found.rank, found.certainty) == (None, "unknown")


def test_a_stopped_rank_whose_table_notes_all_is_known_to_have_begun_no_more():
    waits = [look(rank, AT_TO, groups=[pending()]) for rank in (0, 2)]
    found = find(*waits, look(1, [], state="T", groups=[given(8)]))

    assert (found.rank, found.certainty) == (1, "established")
