"""A job that stands still: the rank that the others wait for is named, with the line where it stands."""

import contextlib
import signal
import time

import psutil
import pytest
import torch
from gpuwatch.collector.store import RunStore
from gpuwatch.core.events.agent_events import RankStall
from gpuwatch.core.wire.messages import EventMessage
from gpuwatch.launcher.agent.rank_stalls import LEAST_S, UNTIL_KNOWN_S

pytestmark = pytest.mark.slow
OWN_HOOKS = hasattr(torch.distributed.ProcessGroup, "register_pre_hook")
"""Whether DDP's own collectives are described: from torch 2.14 on."""
TOLD = ("--hang-timeout", "10", "--preflight", "off")
ABORT = (*TOLD, "--on-hang", "abort")


@pytest.mark.comes_first
@pytest.mark.sample(1, of="a rank that does not come")
@pytest.mark.parametrize(
    ("how", "place", "parts"),
    [
        ("forward", " in forward", ["in the forward of batch 3, in `0` (Block): ", "time.sleep(0.01)"]),
        ("backward", " in backward", ["in the backward of batch 3: ", "time.sleep(0.01)"]),
        ("data", " in load_batch", ["after the optimizer step of batch 2: ", "time.sleep(0.01)"]),
        ("checkpoint", " in save_checkpoint", ["after the optimizer step of batch 2: ", "time.sleep(10_000)"]),
        ("stopped", "is stopped (by SIGSTOP, Ctrl-Z or a debugger)", ["after the optimizer step of batch 2"]),
        ("between", "is stopped (by SIGSTOP, Ctrl-Z or a debugger)", ["after the forward of batch 3"]),
    ],
)
def test_it_is_named_with_what_it_does(bench, how, place, parts):
    """The sentence fits two lines of a terminal, and the evidence has all of it."""
    run = bench.launch("hang.py", *ABORT, nproc=3, args=("--how", how))

    verdict = run.verdict
    assert run.code == 5
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == (
        "hang",
        1,
        "established" if OWN_HOOKS else "supported",
    )
    assert "It never reached the backward's reduction of gradients" in verdict["statement"]
    assert place in verdict["statement"]
    assert any(all(part in line for part in parts) for line in verdict["evidence"]), verdict["evidence"]
    assert {entry["rank"] for entry in verdict["cascade"]} == {0, 2}
    assert all(rank["stack"] or rank["rank"] == 1 for rank in run.report["ranks"])
    assert verdict["statement"] in run.stderr  # at once, while it stood still


@pytest.mark.sample(2, of="an overflow, and then no rank moves")
@pytest.mark.parametrize("options", [(), ("--on-hang", "abort"), ("--on-overflow", "continue", "--on-hang", "abort")])
@pytest.mark.parametrize("how", ["sleeps", "waits"])
def test_an_overflow_before_a_hang_is_told_while_the_job_stands(bench, how, options):
    """The numbers of rank 1 have come from its device, and no hook of it runs that could tell."""
    script = ("overflow_then_hang.py", *TOLD, *options)
    run = bench.launch(*script, nproc=2, args=("--how", how), GPUWATCH_LATE_DEVICE="7")

    overflow = "Rank 1 on {} overflowed first: +inf in the output of `first` (Linear), forward, batch 20."
    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"]) == (4, "overflow", 1)
    assert verdict["statement"] == overflow.format(verdict["host"])
    # The collector tells it, and the agent that the ranks are stopped: two processes, whose lines come in any order.
    assert f"gpuwatch: {verdict['statement']} No rank has moved since: " in run.stderr
    live = run.stderr.partition("stopping the ranks")[0]
    assert "never reached" not in live
    assert "wait for each other" not in live


def test_an_overflow_in_a_forward_that_hangs_is_told_while_the_job_stands(bench):
    """The forward has not returned: the job is ended for the hang."""
    run = bench.launch("overflow_then_hang.py", *ABORT, nproc=2, args=("--how", "inside"))

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (4, "overflow", 1)
    assert f"gpuwatch: {run.verdict['statement']} No rank has moved since: " in run.stderr


@pytest.mark.sample(1, of="a look before the group's timeout")
@pytest.mark.parametrize(
    ("how", "operation", "place"),
    [
        ("default", "all_reduce", "after the backward of batch 3"),
        ("new group", "all_reduce of group 1 (all ranks)", "after the backward of batch 3"),
        ("ddp", "verify_param_shape_across_processes", "before its first batch"),
    ],
)
def test_the_ranks_are_looked_at_before_the_timeout_of_their_group(bench, how, operation, place):
    """With default options: its own limit is 300 s, and 1200 s before the first batch."""
    args = ("--how", how, "--timeout", "15")
    run = bench.launch("group_timeout.py", "--preflight", "off", nproc=2, args=args)

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"]) == (5, "hang", 1)
    assert verdict["statement"].startswith("Rank 1 is at group_timeout.py:")
    assert f". It never reached {operation}, in" in verdict["statement"]
    assert " in elsewhere" in verdict["statement"]
    told = [line for line in verdict["evidence"] if f"{place}: " in line and "in elsewhere: time.sleep(0.1)" in line]
    assert told, verdict["evidence"]
    assert "in which rank 0 has waited for " in verdict["statement"]
    assert f"gpuwatch: {verdict['statement']}" in run.stderr
    assert "(the timeout of its process group, 15 s, ends the job)" in run.stderr


def test_in_a_collective_of_the_scripts_own_it_is_established(bench):
    run = bench.launch("hang.py", *ABORT, nproc=3, args=("--how", "apart"))

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "established")
    assert "It never reached barrier, in which ranks 0, 2 have waited" in verdict["statement"]


@pytest.mark.sample(1, of="slow and healthy")
@pytest.mark.parametrize("how", ["evaluates", "computes", "compiles", "saves", "first"])
def test_what_is_slow_and_healthy_is_not_told(bench, how):
    """For two or three times the limit one rank evaluates, compiles, saves a checkpoint or loads its first batch, and
    the others wait for it; or all compute what nobody sees."""
    run = bench.launch("hang.py", *ABORT, nproc=2, args=("--how", how))

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert "never reached" not in run.stderr
    assert "has not moved" not in run.stderr


@pytest.mark.sample(1, of="slow and healthy")
@pytest.mark.parametrize("whole", [True, False])
def test_a_job_that_was_stopped_and_goes_on_is_no_stall(bench, whole):
    """A laptop that was asleep; Ctrl-Z. Or a debugger that has stopped all ranks, and nothing else."""
    limit_s = 10
    process = bench.start(
        *("gpuwatch.cli.main", "launch", "--nproc-per-node", "2", "--hang-timeout", str(limit_s)),
        *("--preflight", "off", bench.script("hang.py"), "--how", "paused", "--batches", "30"),
    )
    assert process.stdout is not None
    assert any("in the middle" in line for line in process.stdout)
    stopped = bench.processes() if whole else bench.running("-mgpuwatch.worker")
    assert len(stopped) >= (5 if whole else 2)
    for one in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGSTOP)
    time.sleep(2.5 * limit_s)
    for one in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGCONT)
    run = bench.finish(process)

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert "moved for" not in run.stderr
    assert "never reached" not in run.stderr


@pytest.mark.sample(1, of="a rank that works in code that is not known")
@pytest.mark.parametrize("how", ["sleeps", "child", "types"])
def test_a_rank_that_may_come_is_told_and_the_job_is_not_ended(bench, how):
    """It rests for three times the limit, waits for a process of its own, or for what somebody types; and comes."""
    run = bench.launch("hang.py", *TOLD, nproc=2, args=("--how", how))

    assert (run.code, run.verdict["kind"]) == (0, "clean")
    assert run.report["attempts"] == []
    assert "It never reached the backward's reduction of gradients" in run.stderr
    assert "gpuwatch leaves the job as it is, because rank 1 may still go on" in run.stderr
    assert "to end it anyway: --on-hang abort" in run.stderr


@pytest.mark.soak
def test_by_default_the_limit_is_learned_from_the_steps(bench):
    """And a deadlock is ended by it."""
    run = bench.launch("hang.py", "--preflight", "off", nproc=2, args=("--how", "swaps", "--batches", "8"))

    assert (run.code, run.verdict["kind"]) == (5, "hang")
    assert "The ranks wait for each other in different groups" in run.verdict["statement"]
    store = RunStore(run.cwd / "gpuwatch-runs" / "latest" / "run.sqlite")
    events = [body.event for _, _, body in store.messages() if isinstance(body, EventMessage)]
    store.close()
    limits = [event.limit_s for event in events if isinstance(event, RankStall)]
    assert limits
    assert all(LEAST_S <= limit < UNTIL_KNOWN_S for limit in limits)


@pytest.mark.soak
def test_where_all_wait_and_nothing_says_that_it_never_comes_the_job_is_ended_after_four_times_the_limit(bench):
    """Rank 1 leaves out a barrier, and waits in DDP's own collective, which its table does not show."""
    run = bench.launch("hang.py", *TOLD, nproc=3, args=("--how", "passes"))

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (5, "hang", 1)
    assert "if no rank moves, gpuwatch ends the job after 40 s" in run.stderr


@pytest.mark.sample(1, of="a rank that does not come")
def test_ctrl_c_on_a_job_that_stands_still_leaves_the_hang_as_its_verdict(bench):
    process = bench.start(
        *("gpuwatch.cli.main", "launch", *TOLD, "--on-hang", "report", "--nproc-per-node", "2"),
        *(bench.script("hang.py"), "--how", "data"),
    )
    assert process.stderr is not None
    assert any("never reached" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    run = bench.finish(process)

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (5, "hang", 1)


def test_without_abort_the_job_goes_on_and_a_stall_that_passes_is_no_verdict(bench):
    report = ("--hang-timeout", "10", "--on-hang", "report", "--preflight", "off")
    run = bench.launch("hang.py", *report, nproc=2, args=("--how", "sleeps"))

    assert run.code == 0
    assert run.verdict["kind"] == "clean"
    assert "It never reached the backward's reduction of gradients" in run.stderr
    assert "to end it: --on-hang abort" in run.stderr


def test_an_attempt_that_stood_still_is_ended_and_the_next_one_starts(bench):
    """Its verdict is kept beside that of the attempt that went well."""
    run = bench.launch("hang.py", *ABORT, "--max-restarts", "1", nproc=2, args=("--how", "data", "--only-first"))

    assert (run.code, run.verdict["kind"], run.verdict["attempt"]) == (0, "clean", 1)
    (before,) = run.report["attempts"]
    assert before["attempt"] == 0
    assert (before["hang"]["kind"], before["hang"]["rank"]) == ("hang", 1)
    assert "It never reached the backward's reduction of gradients" in before["statement"]
    assert before["statement"] in " ".join(run.stderr.split())


@pytest.mark.sample(1, of="a rank that does not come")
def test_where_each_attempt_stands_still_the_last_verdict_is_a_hang(bench):
    run = bench.launch("hang.py", *ABORT, "--max-restarts", "1", nproc=2, args=("--how", "data"))

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (5, "hang", 1)
    assert [(before["attempt"], before["hang"]["rank"]) for before in run.report["attempts"]] == [(0, 1)]
