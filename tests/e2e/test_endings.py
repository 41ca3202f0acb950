"""However a run ends, the report is written and says how."""

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import threading

import psutil
import pytest

pytestmark = pytest.mark.sample(4, of="an end")  # of those without a mark of their own
PLAIN = ("--preflight", "off")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.comes_first
def test_a_killed_rank_is_lost_in_the_module_it_was_in(bench):
    run = bench.launch("killed.py", *PLAIN)

    assert run.code == 5
    verdict = run.verdict
    assert {key: verdict[key] for key in ("kind", "rank", "module", "class", "batch", "signal")} == {
        "kind": "lost",
        "rank": 1,
        "module": "middle.deadly",
        "class": "Deadly",
        "batch": 2,
        "signal": "SIGKILL",
    }
    frames = run.report["ranks"][1]["frames"]
    assert [(frame["batch"], frame["module"]) for frame in frames] == [(2, "start"), (2, "middle.first")]
    assert [entry["rank"] for entry in verdict["cascade"]] == [0]
    (advice,) = [step for step in verdict["next"] if step.startswith("Its last frames")]
    assert f"\n    {advice.splitlines()[1]}\n" in run.stdout + run.stderr
    _, *words = shlex.split(advice.splitlines()[1])
    bench.cwd = bench.cwd / "gpuwatch-runs"  # the advice is about this run, wherever it is typed
    shown = bench.gpuwatch(*words).stdout
    assert "was killed by SIGKILL" in shown
    assert "Rank 1, batch 2: last 2 forward frames" in shown


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "line", "hint"),
    [
        ("SIGBUS", "memory[0] = 1", "/dev/shm or a disk is full"),
        ("SIGSEGV", "ctypes.string_at(0)", "Its last frames"),
        ("SIGILL", "os.kill(os.getpid(), getattr(signal, how))", "an extension was built for another processor"),
    ],
)
def test_a_rank_that_a_fatal_signal_ends_is_told_with_the_line_where_it_came(bench, name, line, hint):
    run = bench.launch("killed.py", *PLAIN, args=(name,))

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"], verdict["signal"]) == (5, "lost", 1, name)
    assert (
        f"was killed by {name} in the forward of batch 2, in `middle.deadly` (Deadly), at killed.py:"
        in (verdict["statement"])
    )
    assert f"in die: {line}" in verdict["statement"]
    assert any("in forward: die(" in text for text in verdict["evidence"])
    assert any("free in /dev/shm" in text for text in verdict["evidence"]) == (name == "SIGBUS")
    assert any(hint in text for text in verdict["next"])


@pytest.mark.slow
@pytest.mark.sample(2, of="followers")
@pytest.mark.parametrize(
    ("how", "nproc", "certainty"),
    [
        ("hides", 2, "established"),
        ("exits", 3, "established"),
        ("is told", 2, "established"),
        ("raises another", 3, "established"),
        ("fails later", 3, "supported"),
        ("had left", 3, "established"),
    ],
)
def test_the_first_to_raise_is_named_whatever_the_others_do_then(bench, how, nproc, certainty):
    run = bench.launch("followers.py", *PLAIN, args=(how,), nproc=nproc)

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"], verdict["certainty"]) == (1, "crash", 1, certainty)
    assert "HTTPSConnectionPool: Read timed out." in verdict["statement"]


@pytest.mark.slow
@pytest.mark.sample(1, of="a teardown")
@pytest.mark.parametrize(
    ("how", "certainty", "said"),
    [
        ("exits", "established", " in end: loss is nan."),
        ("exits in try", "supported", "took its process group down while it handled SystemExit: loss is nan, and rank"),
        (
            "raises in try",
            "supported",
            "while it handled OSError: HTTPSConnectionPool: Read timed out, and rank 0 could not",
        ),
    ],
)
def test_what_a_rank_said_before_a_teardown_that_is_cut_short_is_told(bench, how, certainty, said):
    run = bench.launch("teardown.py", *PLAIN, args=(how,))

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"], verdict["certainty"]) == (1, "crash", 1, certainty)
    assert said in verdict["statement"]
    assert ("ended with exit code 1 at teardown.py:" in verdict["statement"]) == (how == "exits")
    assert [entry["rank"] for entry in verdict["cascade"]] == [0]


@pytest.mark.parametrize(
    ("how", "nproc", "operation"),
    [
        pytest.param(
            *("backward", 2, "the backward's reduction of gradients"),
            marks=[pytest.mark.slow, pytest.mark.sample(1), pytest.mark.comes_first],
        ),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.sample(1, of="an abort")])
            for case in (
                ("backward", 3, "the backward's reduction of gradients"),
                ("constructor", 2, "verify_param_shape_across_processes"),
                ("functional", 2, "a functional collective"),
                ("timeout", 2, "the backward's reduction of gradients"),
            )
        ),
    ],
)
def test_a_rank_that_is_aborted_while_it_waits_is_not_the_first_failure(bench, how, nproc, operation):
    run = bench.launch("aborts.py", *PLAIN, args=(how,), nproc=nproc)

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"], verdict["certainty"]) == (5, "hang", 1, "supported")
    assert verdict["statement"].startswith("Rank 1 was at aborts.py:")
    assert f". It never reached {operation}, in which rank" in verdict["statement"]
    assert any("in elsewhere: time.sleep(3600)" in line for line in verdict["evidence"])
    assert any("in elsewhere" in line for line in run.report["ranks"][1]["stack"])
    assert [entry["rank"] for entry in verdict["cascade"]] == [rank for rank in range(nproc) if rank != 1]


@pytest.mark.slow
@pytest.mark.sample(1, of="an abort")
def test_where_gloo_aborts_a_rank_that_meets_another_collective_both_lines_are_told_and_nobody_is_named(bench):
    run = bench.launch("aborts.py", *PLAIN, args=("sizes",))

    verdict = run.verdict
    assert (verdict["rank"], verdict["certainty"]) == (None, "unknown")
    assert "in main: model.weight.full_tensor()" in verdict["statement"]
    assert re.search(r"rank 1 at aborts.py:\d+ in main: loss", verdict["statement"])


@pytest.mark.slow
def test_a_data_loaders_worker_that_outlives_its_rank_is_told_and_left_alone(bench):
    run = bench.launch("stuck_loader.py", *PLAIN, nproc=1)
    (left,) = bench.processes()
    left.kill()

    assert (run.code, run.verdict["kind"], run.verdict["rank"]) == (5, "lost", 0)
    assert "1 process that a rank had started has outlived the rank (a stuck data loader worker" in run.stderr
    assert re.search(rf"and may hold memory: kill {left.pid}( \[GW\d+\])?\n", run.stderr)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=[pytest.mark.slow, pytest.mark.comes_first]),
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)),
    ],
)
def test_a_signal_ends_everything_and_the_report_is_written(bench, number):
    process = bench.start("gpuwatch.cli.main", "launch", *PLAIN, "--nproc-per-node", "2", bench.script("waits.py"))
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    process.send_signal(number)
    run = bench.finish(process)

    assert run.code == 128 + number
    assert (run.verdict["kind"], run.verdict["signal"]) == ("interrupted", number.name)
    assert run.report["ranks"][0]["batch"] >= 3
    assert "VERDICT  interrupted" in run.stderr


@pytest.mark.slow
@pytest.mark.sample(1, of="an abort")
def test_a_job_that_is_ended_while_it_stands_still_tells_who_was_waited_for(bench):
    options = (*PLAIN, "--nproc-per-node", "2")
    process = bench.start("gpuwatch.cli.main", "launch", *options, bench.script("aborts.py"), "nothing")
    assert process.stdout is not None
    assert process.stdout.readline() == "stands still\n"
    process.send_signal(signal.SIGTERM)
    run = bench.finish(process)

    assert (run.code, run.verdict["kind"]) == (128 + signal.SIGTERM, "interrupted")
    assert "It had stood still for " in run.verdict["statement"]
    assert ". It never reached the backward's reduction of gradients" in run.verdict["statement"]
    assert any("in elsewhere: time.sleep(3600)" in line for line in run.verdict["evidence"])


@pytest.mark.slow
def test_a_second_signal_leaves_at_once_and_leaves_nothing(bench):
    process = bench.start("gpuwatch.cli.main", "launch", *PLAIN, "--nproc-per-node", "1", bench.script("waits.py"))
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    run = bench.finish(process)

    assert run.code in (128 + signal.SIGTERM, 128 + signal.SIGINT)


@pytest.mark.slow
def test_a_killed_launch_leaves_its_report_and_nothing_else(bench):
    process = bench.start("gpuwatch.cli.main", "launch", *PLAIN, "--nproc-per-node", "1", bench.script("waits.py"))
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    (worker,) = bench.running("-mgpuwatch.worker")
    process.kill()
    process.wait()
    helpers = [p for p in bench.processes() if p.pid != worker.pid]
    _, alive = psutil.wait_procs(helpers, timeout=300)
    runs_on = worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    worker.kill()  # the ranks of a killed torchrun live on, too
    process.communicate()

    assert alive == []
    assert runs_on
    (path,) = (bench.cwd / "gpuwatch-runs").glob("*-*/report.json")
    report = json.loads(path.read_text())
    assert report["verdict"]["kind"] == "interrupted"
    assert f"rank 0 (process id {worker.pid}) was still running then" in report["verdict"]["statement"]
    assert report["verdict"]["next"][0].endswith(f"kill {worker.pid}")
    assert [rank["state"] for rank in report["ranks"]] == ["running"]


@pytest.mark.slow  # tests/launcher/test_delivery.py kills them under recorders, which is quick
@pytest.mark.sample(1)
@pytest.mark.parametrize("helper", ["gpuwatch.collector", "gpuwatch.launcher.agent.agent"])
def test_a_helper_that_is_killed_in_the_middle_costs_nothing(bench, helper):
    options = ("--rank", "1", "--batch", "40", "--batches", "100000")
    process = bench.start(
        "gpuwatch.cli.main", "launch", *PLAIN, "--nproc-per-node", "2", bench.script("ddp_overflow.py"), *options
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("batch 0")
    bench.running(helper)[0].kill()
    run = bench.finish(process)

    assert run.code == 4
    assert (run.verdict["rank"], run.verdict["module"], run.verdict["batch"]) == (1, "block.widen", 40)
    assert "started again" in run.stderr
    assert not list((bench.cwd / "gpuwatch-runs").glob("*.spool"))


@contextlib.contextmanager
def slowed_down(process):
    """A machine on which this process gets a hundredth of a processor."""
    ended = threading.Event()

    def stop_and_go():
        with contextlib.suppress(psutil.NoSuchProcess):
            while not ended.wait(0.01):
                process.suspend()
                ended.wait(1.0)
                process.resume()

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_a_report_that_takes_long_is_waited_for(bench):
    options = ("--rank", "1", "--batch", "10", "--batches", "100000")
    process = bench.start(
        "gpuwatch.cli.main", "launch", *PLAIN, "--nproc-per-node", "2", bench.script("ddp_overflow.py"), *options
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("batch 0")
    (collector,) = bench.running("gpuwatch.collector")
    with slowed_down(collector):
        run = bench.finish(process)

    assert run.code == 4
    assert (run.verdict["rank"], run.verdict["module"], run.verdict["batch"]) == (1, "block.widen", 10)
    assert run.verdict["certainty"] == "established"
    assert "started again" not in run.stderr, "who is at work is not ended"


@pytest.mark.slow  # until the agent is given up
@pytest.mark.parametrize("on_overflow", ["abort", "continue"])
def test_without_any_agent_the_launch_still_tells_what_its_rank_has_said(bench, on_overflow):
    options = (*PLAIN, "--on-overflow", on_overflow)
    run = bench.launch(
        "ddp_overflow.py", *options, args=("--rank", "1", "--batch", "2"), PYTHONPATH=str(bench.script("dead_agent"))
    )

    assert run.code == 4
    assert "rank 1: +inf in output of" in run.stderr.replace("rank 1 saw an overflow", "rank 1")
    assert "`block.widen` (Linear), forward of batch 2; the report lacks this overflow" in run.stderr
    assert "VERDICT" not in run.stderr


@pytest.mark.slow
def test_two_jobs_on_one_host_do_not_meet(bench):
    commands = [
        (bench.script("ddp_overflow.py"), "--rank", "1", "--batch", "1"),
        (bench.script("killed.py"),),
    ]
    started = [
        bench.start("gpuwatch.cli.main", "launch", *PLAIN, "--nproc-per-node", "2", *command) for command in commands
    ]
    runs = [bench.finish(process) for process in started]

    assert [run.code for run in runs] == [4, 5]
    folders = [re.search(r"the report will be in (\S+)", run.stderr) for run in runs]
    assert len({match.group(1) for match in folders if match}) == 2
    assert "block.widen" in runs[0].stderr
    assert "block.widen" not in runs[1].stderr


@pytest.mark.slow
def test_no_room_for_a_recorder_means_training_unwatched(bench):
    run = bench.launch("clean.py", nproc=1, PYTHONPATH=str(bench.script("no_room")))

    assert run.code == 6
    assert (run.verdict["kind"], run.verdict["missing"]) == ("unknown", ["rank 0 had no recorder"])
    assert "goes on unwatched" in run.stderr
    assert "rank 0 step 9" in run.stdout


@pytest.mark.slow
def test_an_overflow_that_no_recorder_had_room_for_is_never_clean(bench):
    """No rank could be watched, so nothing is known of them."""
    arguments = ("--rank", "1", "--batch", "1")
    run = bench.launch("ddp_overflow.py", args=arguments, PYTHONPATH=str(bench.script("no_room")))

    assert run.code != 0
    assert run.verdict["kind"] != "clean"
    assert run.verdict["missing"] == ["ranks 0, 1 had no recorders"]


@pytest.mark.slow
def test_a_machine_with_little_shared_memory_says_so_and_records_on_a_disk(bench):
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("cannot mount a small /dev/shm: not root, or in a container without the right to")
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "gpuwatch.cli.main", "launch", "--nproc-per-node", "2", bench.script("clean.py")]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *command],
        cwd=bench.cwd,
        env={**bench.environment, "TMPDIR": str(bench.cwd)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "/dev/shm has 8 MiB free, and 2 recorders need 12 MiB" in done.stderr
    assert done.stderr.index("/dev/shm has") < done.stderr.index("running under torchrun")
    assert f"the recorders are in {bench.cwd}" in done.stderr
    assert "VERDICT  clean" in done.stderr


@pytest.mark.slow
def test_an_unwritable_runs_folder_is_one_sentence(bench):
    (bench.cwd / "file").write_text("not a folder")
    run = bench.launch("clean.py", "--runs-dir", "file")

    assert run.code == 2
    assert "--runs-dir" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_rank_that_looks_for_the_operation_is_not_ended_because_another_fails(bench):
    run = bench.launch("looks_long.py")

    assert run.code == 4
    verdict = run.verdict
    assert (verdict["rank"], verdict["module"], verdict["batch"]) == (1, "1", 0)
    assert verdict["operation"]["code"] == "return x * 1e30 * 1e30"
    assert [rank["state"] for rank in run.report["ranks"]] == ["failed", "aborted"]
