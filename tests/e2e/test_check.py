"""`gpuwatch check`: the preflight of a job alone, with the real command."""

import json
import re
import signal

import pytest

from ..waiting import until

pytestmark = pytest.mark.sample(3, of="gpuwatch check")  # of those without a mark of their own

FULL = ["inventory", "arrive", "consistency", "health", "allocation", "compute", "node group", "bandwidth"]


def start_check(bench, port, *options: str, in_background: bool = False):
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "a job")
    command = ("gpuwatch.cli.main", "check", "--nproc-per-node", "1", *where, *options)
    return bench.start(*command, in_background=in_background)


def preflight_lines(run) -> list[str]:
    """Without those that a slow machine adds: a stage takes long."""
    lines = [line for line in run.stderr.splitlines() if line.startswith("gpuwatch: preflight ")]
    return [line for line in lines if not line.endswith("still waiting")]


@pytest.mark.slow
@pytest.mark.comes_first
def test_a_healthy_machine_passes(bench):
    run = bench.gpuwatch("check", "--nproc-per-node", "2", "--alloc", "16MiB", "--bandwidth-size", "1MiB")

    assert run.code == 0
    assert "Preflight passed: 2 ranks on 1 node" in run.stdout
    assert "Bandwidth of all_reduce over 2 ranks" in run.stdout
    # other load on the machine may make one of them slower than the other: that is a warning of it
    good = re.search(r"2 of 2 ranks OK on the CPU( \(rank \d with a warning\))?, torch ", " ".join(run.stdout.split()))
    assert good is not None
    assert (good[1] is not None) == ("warn: rank" in run.stdout)
    told = [line.split("preflight ")[1] for line in preflight_lines(run)]
    assert [line[:12].rstrip() for line in told] == FULL
    assert all("2 of 2 ranks" in line for line in told)
    report = run.report
    assert report["run"]["check_only"] is True
    assert [column["stage"] for column in report["preflight"]["stages"]] == FULL
    assert {column["ranks"] for column in report["preflight"]["stages"]} == {2}
    assert [row["size_bytes"] for row in report["preflight"]["bandwidth"]][-1] == 1 << 20
    assert [entry["facts"]["device"] for entry in report["preflight"]["inventory"]] == ["cpu", "cpu"]
    assert [len(rank["preflight"]["stages"]) for rank in report["ranks"]] == [8, 8]


@pytest.mark.slow
def test_a_quick_one_as_json_is_the_report_and_nothing_else(bench):
    run = bench.gpuwatch("check", "--nproc-per-node", "2", "--quick", "--format", "json")

    assert run.code == 0
    printed = json.loads(run.stdout)
    assert printed == run.report
    assert [column["stage"] for column in printed["preflight"]["stages"]] == [*FULL[:5], "node group"]


@pytest.mark.slow
def test_a_failure_exits_with_3_and_its_reason_is_the_answer(bench):
    run = bench.gpuwatch("check", "--nproc-per-node", "2", "--bandwidth-size", "64K", "--min-busbw", "100000")

    assert run.code == 3
    assert (run.verdict["kind"], run.verdict["stage"], run.verdict["rank"]) == ("preflight", "bandwidth", None)
    assert "below the 100000 GB/s of --min-busbw" in " ".join(run.stdout.split())
    assert "Traceback" not in run.stderr
    assert "exitcode" not in run.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("train.py",), "check runs no script, found 'train.py'"),
        (("--nproc-per-node", "0"), "--nproc-per-node: expected 1 or more"),
        (("--alloc", "80"), "expected a share of the free memory"),
        (("--on-overflow", "abort"), "unrecognized arguments"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exits_with_2(refused, tmp_path, options, words):
    code, _, stderr = refused("check", *options)

    assert code == 2
    (line,) = stderr.splitlines()
    assert words in line
    assert not (tmp_path / "gpuwatch-runs").exists()


@pytest.mark.slow
def test_two_nodes_are_tested_together(bench, port):
    nodes = [start_check(bench, port, "--format", "json") for _ in range(2)]
    runs = [bench.finish(node) for node in nodes]

    assert [run.code for run in runs] == [0, 0]
    printed = [run.stdout for run in runs if run.stdout]
    assert [json.loads(text) for text in printed] == [runs[0].report], "the head node prints it, for one reader"
    preflight = runs[0].report["preflight"]
    assert [column["stage"] for column in preflight["stages"]] == [*FULL[:6], "cross group", "bandwidth"]
    assert [node["ranks"] for node in preflight["nodes"]] == [[0], [1]]


C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{}", "--rdzv-id", "a job")
STATIC = ("--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "{}")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("where", [C10D, STATIC], ids=["c10d", "static"])
def test_a_node_that_never_comes_is_waited_for_and_then_missed(bench, port, where):
    meeting_point = [word.format(port) for word in where]
    run = bench.gpuwatch("check", "--nproc-per-node", "1", "--nnodes", "2", *meeting_point, "--preflight-timeout", "4")

    assert run.code == 3
    assert (run.verdict["kind"], run.verdict["stage"]) == ("preflight", "arrive")
    assert "1 of 2 nodes did not arrive" in " ".join(run.stdout.split())
    assert "gpuwatch: torchrun's rendezvous failed: " in run.stderr
    assert "Traceback" not in run.stderr


AGENT, COLLECTOR = "gpuwatch.launcher.agent.agent", "gpuwatch.collector"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("child", "in_background"),
    [
        (AGENT, True),
        (AGENT, False),
        (COLLECTOR, False),
    ],
)
def test_ctrl_c_before_the_ranks_are_started_ends_it(bench, port, child, in_background):
    """While a child is being started, and while the other node is waited for."""
    check = start_check(bench, port, in_background=in_background)

    def is_there() -> bool:
        assert check.poll() is None, check.communicate()
        return bool(bench.running(child))

    until(is_there, f"a process {child}")
    check.send_signal(signal.SIGINT)
    run = bench.finish(check)

    assert run.code == 130
    assert (run.verdict["kind"], run.verdict["signal"]) == ("interrupted", "SIGINT")
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_what_a_check_has_started_ends_with_it(bench):
    """However it ends, and not once its ranks give up: these are stopped, and cannot."""
    check = bench.start("gpuwatch.cli.main", "check", "--nproc-per-node", "2")
    tests = "gpuwatch.worker.preflight.coordinator"

    def has_begun() -> bool:
        assert check.poll() is None, check.communicate()
        return len(bench.running(tests)) == 2  # each rank has come as far

    until(has_begun, f"two processes {tests}")
    ranks = bench.running("-mgpuwatch.worker")
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()
    check.kill()
    assert check.wait() == -signal.SIGKILL
    until(lambda: not any(rank.is_running() for rank in ranks), "the end of its ranks", lambda: ranks)


@pytest.mark.slow
def test_a_launch_tells_its_preflight_in_one_line(bench):
    run = bench.launch("clean.py")

    assert run.code == 0
    told = preflight_lines(run)
    assert len(told) == 1
    assert told[0].startswith("gpuwatch: preflight ok: 2 ranks on 1 node in ")


@pytest.mark.slow
def test_a_launch_can_have_the_full_one(bench):
    run = bench.launch("clean.py", "--preflight", "full", "--alloc", "16MiB", "--bandwidth-size", "64K")

    assert run.code == 0
    assert "rank 0 step 9" in run.stdout
    assert [column["stage"] for column in run.report["preflight"]["stages"]] == FULL
