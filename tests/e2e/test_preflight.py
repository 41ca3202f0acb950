"""A rank that cannot take part is named before the training starts. The faults are put into the real processes."""

import signal
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist
from gpuwatch.core.preflight import PreflightFinding

pytestmark = pytest.mark.sample(2, of="a preflight")  # of those without a mark of their own

slow = pytest.mark.slow
NEVER = ("--preflight-timeout", "3000")
"""A deadline beyond that of the test: the news travels through the store, and nobody waits for it."""

WAITS_FOR_FORGED = """
import os, time
while "RANK" in os.environ and not os.path.exists("forged"):
    time.sleep(0.02)
"""


def launch_bad(bench, way: str, *options: str, script: str = "clean.py", nproc: int = 2, **environment: str):
    """The finished run of a launch with one bad rank."""
    bad = {"BAD_PROBE": way, "PYTHONPATH": bench.script("bad_probe"), **environment}
    return bench.launch(script, *options, nproc=nproc, **bad)


def outcomes(run) -> list[str]:
    return [rank["preflight"]["outcome"] for rank in run.report["ranks"]]


def grades(run, rank: int) -> dict[str, str]:
    return {stage["stage"]: stage["grade"] for stage in run.report["ranks"][rank]["preflight"]["stages"]}


DIES = ("dies", "node group", "died at all_gather: killed by SIGKILL", NEVER)
COORDINATOR_DIES = (
    (
        "coordinator dies",
        "inventory",
        "died in stage inventory at the inspection of its device: killed by SIGKILL",
        NEVER,
    )
    if torch.version.cuda  # it looks at the GPU in a child, which is its first one
    else ("coordinator dies", "allocation", "died in stage allocation: killed by SIGKILL", NEVER)
)
SOON = ("--preflight-timeout", "30")
HANGS = ("hangs", "node group", "hung at all_gather for 30 s", SOON)
COORDINATOR_HANGS = ("coordinator hangs", "allocation", "hung in stage allocation", SOON)


@pytest.mark.parametrize(
    ("way", "stage", "words", "timeout", "bad_rank"),
    [
        pytest.param(*DIES, 1, marks=[slow, pytest.mark.comes_first]),
        pytest.param(*DIES, 0, marks=slow),
        pytest.param(*HANGS, 1, marks=slow),
        *(
            pytest.param(*bad, rank, marks=[slow, pytest.mark.sample(1, of=bad[0])])
            for bad in (COORDINATOR_DIES, COORDINATOR_HANGS)
            for rank in (0, 1)
        ),
        pytest.param(*HANGS, 0, marks=pytest.mark.soak),
    ],
)
def test_the_bad_rank_and_its_stage_are_named(bench, way, stage, words, timeout, bad_rank):
    if way == "coordinator hangs" and torch.version.cuda:
        pytest.skip("it hangs in the look at the GPU, as long as the others wait for it: either may be told first")
    run = launch_bad(bench, way, *timeout, BAD_RANK=str(bad_rank))

    assert "rank 0 step" not in run.stdout
    assert run.code == 3
    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["stage"]) == ("preflight", bad_rank, stage)
    assert words in verdict["statement"]
    assert outcomes(run)[bad_rank] == "failed"
    assert outcomes(run)[1 - bad_rank] == "victim"
    # rank 0 says it too, unless torchrun ends it before
    assert verdict["statement"] in " ".join(run.stderr.split())


@pytest.mark.slow
def test_a_worker_that_is_killed_in_its_preflight_is_named(bench):
    """torchrun sees that before we do, and stops the job."""
    run = launch_bad(bench, "worker dies", *NEVER)

    assert run.code not in (0, 3)
    assert (run.verdict["kind"], run.verdict["rank"]) == ("lost", 1)
    assert grades(run, 1)["arrive"] == "ok"


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_starts_is_missed(bench, missing):
    run = launch_bad(bench, "starts after 1000 s", "--preflight-timeout", "20", BAD_RANK=str(missing))

    assert run.code == 3
    assert f"rank {missing} (node " in run.verdict["statement"]
    assert "did not arrive within 20 s" in run.verdict["statement"]
    assert outcomes(run)[1 - missing] == "victim"


@pytest.mark.slow
def test_who_is_missing_is_said_with_its_node(bench, port):
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "a job")
    options = ("--nproc-per-node", "3", *where, "--preflight-timeout", "20", bench.script("clean.py"))
    bad = {"BAD_PROBE": "starts after 1000 s", "BAD_RANK": "3,4,5", "PYTHONPATH": bench.script("bad_probe")}
    nodes = [bench.start("gpuwatch.cli.main", "launch", *options, **bad) for _ in range(2)]
    runs = [bench.finish(node) for node in nodes]

    assert [run.code for run in runs] == [3, 3]
    assert "ranks 3-5 (node " in runs[0].verdict["statement"]


@pytest.mark.parametrize(
    ("late_s", "timeout_s"), [pytest.param(4, 300, marks=slow), pytest.param(30, 300, marks=pytest.mark.soak)]
)
def test_a_rank_that_starts_late_is_waited_for(bench, late_s, timeout_s):
    run = launch_bad(bench, f"starts after {late_s} s", "--preflight-timeout", str(timeout_s))

    assert run.code == 0
    assert outcomes(run) == ["ok", "ok"]
    assert grades(run, 0)["arrive"] == grades(run, 1)["arrive"] == "ok"


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["quick", "full"])
def test_a_good_launch_passes_every_stage_and_leaves_nothing(bench, mode):
    run = bench.launch("late_init.py", "--preflight", mode, "--max-restarts", "1", args=("-1",))

    assert run.code == 0
    local = ["inventory", "arrive", "consistency", "health", "allocation"]
    assert list(grades(run, 0)) == [*local, *(["compute"] if mode == "full" else []), "node group"] + (
        ["bandwidth"] if mode == "full" else []
    )
    assert outcomes(run) == ["ok", "ok"]
    assert "attempt 0 keys of gpuwatch []" in run.stdout


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("late_rank", [0, 1])
def test_the_scripts_own_group_comes_up_with_any_rank_late_and_after_a_restart(bench, late_rank):
    run = bench.launch("late_init.py", "--max-restarts", "1", args=(str(late_rank),))

    assert run.code == 0
    for attempt in (0, 1):
        assert f"attempt {attempt} keys of gpuwatch []" in run.stdout
    assert "attempt 1 rank 0 done" in run.stdout
    assert "attempt 1 rank 1 done" in run.stdout
    assert run.report["run"]["attempts"] == 2


@pytest.mark.slow
def test_a_bad_rank_whose_last_word_is_cut_off_keeps_nobody_longer_than_the_deadlines(bench):
    run = launch_bad(bench, "coordinator dies", "--preflight-timeout", "20", BAD_TELLER="1")

    assert run.code == 3
    assert run.verdict["rank"] == 1


@pytest.mark.slow
def test_an_error_of_the_test_itself_does_not_keep_the_training_from_starting(bench):
    run = launch_bad(bench, "no longer there", "--preflight-timeout", "20")

    assert run.code == 0
    assert "rank 0 step 9" in run.stdout


@pytest.mark.slow
def test_a_failure_is_not_restarted(bench):
    run = launch_bad(bench, "dies", "--max-restarts", "3")

    assert run.code == 3
    assert run.report["run"]["attempts"] == 1


@pytest.mark.slow
def test_training_starts_all_the_same_when_asked_to(bench):
    run = launch_bad(bench, "dies", "--on-preflight-failure", "continue")

    assert run.code == 0
    assert "rank 0 step 9" in run.stdout
    assert run.verdict["kind"] == "clean"
    assert outcomes(run)[1] == "failed"


@pytest.mark.slow
def test_it_can_be_left_out(bench):
    run = bench.launch("clean.py", "--preflight", "off")

    assert run.code == 0
    assert {rank["preflight"]["outcome"] for rank in run.report["ranks"]} == {"off"}


@pytest.mark.slow
def test_ctrl_c_ends_a_preflight_that_hangs(bench):
    launch = bench.start(
        "gpuwatch.cli.main",
        "launch",
        "--nproc-per-node",
        "2",
        bench.script("clean.py"),
        BAD_PROBE="hangs",
        PYTHONPATH=bench.script("bad_probe"),
    )
    while len(bench.running("gpuwatch.worker.preflight.coordinator")) < 4:  # two, and the test that each has forked
        assert launch.poll() is None
    launch.send_signal(signal.SIGINT)
    run = bench.finish(launch)

    assert run.code == 130
    assert run.verdict["kind"] == "interrupted"


@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_forged_conclusion_in_torchruns_store_stops_no_job(bench, port):
    """Whoever reaches the port can write there; what is not sealed with the job's key is not believed."""
    (bench.cwd / "sitecustomize.py").write_text(WAITS_FOR_FORGED)
    where = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    command = ("launch", "--nproc-per-node", "2", *where, bench.script("clean.py"))
    launch = bench.start("gpuwatch.cli.main", *command, PYTHONPATH=str(bench.cwd))
    stranger = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    forged = {"findings": [PreflightFinding("arrive", "fail", "rank", [1], [], "rank 1 is broken")], "outcomes": []}
    stranger.set(f"gpuwatch/{launch.pid}-0/arrive/conclusion", msgspec.json.encode(forged).decode())
    (bench.cwd / "forged").touch()
    run = bench.finish(launch)

    assert (run.code, run.verdict["kind"]) == (0, "clean")
    assert "was not written by this job" in " ".join(run.stderr.split())
    assert "rank 1 is broken" not in run.stderr
