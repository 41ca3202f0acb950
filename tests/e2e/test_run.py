"""`gpuwatch run`: a command as it stands, whatever starts the ranks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import gpuwatch
import pytest
from gpuwatch.core.recorder.run_folder import RUN_VARIABLE
from gpuwatch.launcher.run.command import PATH_FOLDER

pytestmark = pytest.mark.sample(3, of="gpuwatch run")  # of those without a mark of their own

PYTHON = sys.executable
NEVER = ("--rank", "-1", "--batch", "2")
RANK_1 = ("--rank", "1", "--batch", "2")


def torchrun(bench, *arguments):
    return (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", bench.script("ddp_overflow.py"), *arguments)


def spawn(bench, *arguments):
    return (PYTHON, bench.script("spawned.py"), *arguments)


def by_hand(bench, port, *arguments):
    script = bench.script("ddp_overflow.py")
    return ("sh", bench.script("two_ranks.sh"), str(port), PYTHON, script, *arguments)


def plain(bench, *command):
    done = subprocess.run(command, cwd=bench.cwd, env=bench.environment, capture_output=True, text=True, timeout=400)
    return done.returncode, sorted(done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.comes_first
def test_a_process_alone_is_rank_0_of_1(bench):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("alone.py"))

    assert (watched.code, sorted(watched.stdout.splitlines())) == plain(bench, PYTHON, bench.script("alone.py"))
    assert (watched.verdict["kind"], watched.verdict["certainty"]) == ("clean", "established")
    assert [(rank["rank"], rank["state"], rank["batch"]) for rank in watched.report["ranks"]] == [(0, "finished", 3)]
    assert watched.report["run"]["command"][:3] == ["gpuwatch", "run", PYTHON]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [torchrun, spawn])
def test_ranks_compute_the_same_bits(bench, command):
    watched = bench.gpuwatch("run", "--", *command(bench, *NEVER))

    assert (watched.code, sorted(watched.stdout.splitlines())) == plain(bench, *command(bench, *NEVER))
    assert watched.code == 0
    assert (watched.verdict["kind"], watched.verdict["certainty"]) == ("clean", "established")
    assert [rank["state"] for rank in watched.report["ranks"]] == ["finished", "finished"]


@pytest.mark.slow
def test_forks_of_a_process_that_was_watched_are_ranks(bench):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("forked.py"), *RANK_1)

    assert watched.code == 4
    verdict = watched.verdict
    assert (verdict["kind"], verdict["rank"], verdict["module"]) == ("overflow", 1, "block.widen")
    assert [rank["rank"] for rank in watched.report["ranks"]] == [0, 1]


@pytest.mark.slow
def test_helpers_of_a_rank_are_no_ranks(bench):
    script = bench.script("with_helpers.py")
    command = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *NEVER)
    watched = bench.gpuwatch("run", "--", *command)

    assert watched.code == 0
    assert (watched.verdict["kind"], watched.verdict["certainty"]) == ("clean", "established")
    ranks = [(rank["rank"], rank["attempt"], rank["batch"]) for rank in watched.report["ranks"]]
    assert ranks == [(0, 0, 5), (1, 0, 5)]


@pytest.mark.slow
def test_ranks_that_a_shell_starts(bench, port):
    watched = bench.gpuwatch("run", "--", *by_hand(bench, port, *NEVER))

    assert (watched.code, sorted(watched.stdout.splitlines())) == plain(bench, *by_hand(bench, port, *NEVER))
    assert (watched.verdict["kind"], watched.verdict["certainty"]) == ("clean", "established")
    assert [rank["rank"] for rank in watched.report["ranks"]] == [0, 1]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [torchrun, spawn])
def test_the_first_rank_and_module_are_named(bench, command):
    watched = bench.gpuwatch("run", "--", *command(bench, *RANK_1))

    assert watched.code == 4
    verdict = watched.verdict
    assert (verdict["kind"], verdict["rank"], verdict["module"]) == ("overflow", 1, "block.widen")
    assert (verdict["batch"], verdict["value"], verdict["certainty"]) == (2, "+inf", "established")


@pytest.mark.slow
def test_the_first_of_ranks_that_a_shell_starts(bench, port):
    watched = bench.gpuwatch("run", "--", *by_hand(bench, port, *RANK_1))

    assert watched.code == 4
    assert (watched.verdict["kind"], watched.verdict["rank"], watched.verdict["module"]) == (
        "overflow",
        1,
        "block.widen",
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "code", "kind", "words"),
    [
        ("raise", 1, "crash", "raised ValueError: as it was asked to"),
        ("exit", 7, "crash", "ended with exit code 7"),
        ("overflow", 4, "overflow", "`1`"),
    ],
)
def test_the_exit_code_is_the_commands_own_but_for_an_overflow(bench, how, code, kind, words):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("alone.py"), how)

    assert (watched.code, watched.verdict["kind"]) == (code, kind)
    assert words in watched.verdict["statement"]


@pytest.mark.slow
def test_an_overflow_that_was_asked_to_go_on_is_told(bench):
    watched = bench.gpuwatch("run", "--on-overflow", "continue", "--", PYTHON, bench.script("alone.py"), "overflow")

    assert watched.code == 4
    assert len(watched.stdout.splitlines()) == 4, "the script went on to its end"


@pytest.mark.slow
def test_a_script_that_swallows_the_abort_is_ended(bench):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("alone.py"), "overflow", "swallow")

    assert watched.code == 4
    assert "stopping the command: another rank has aborted the job" in watched.stderr


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("how", "certainty"), [(("left",), "established"), (("left", "goes on"), "supported")])
def test_a_rank_that_is_killed_after_it_has_left_its_group_was_clean(bench, how, certainty):
    """Its launcher ends it so, and leaves with 0."""
    script = 'python=$1; shift; "$python" "$@"; exit 0'
    watched = bench.gpuwatch("run", "--", "sh", "-c", script, "sh", PYTHON, bench.script("killed_after.py"), *how)

    assert watched.code == 0
    assert (watched.verdict["kind"], watched.verdict["certainty"]) == ("clean", certainty)


# -- what ends it -----------------------------------------------------------------------------------------------


def started(bench, *command, **environment):
    """A run whose two ranks are in their first batches, and wait there."""
    process = bench.start("gpuwatch.cli.main", "run", "--", *command, **environment)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("batch 0"):
            return process
    raise AssertionError(process.communicate())


def waiting(bench):
    script = bench.script("ddp_overflow.py")
    return (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *NEVER, "--batches", "100000000")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_and_is_in_the_report(bench, number):
    process = started(bench, *waiting(bench))
    process.send_signal(number)
    ended = bench.finish(process)

    assert ended.code != 0
    assert (ended.verdict["kind"], ended.verdict["signal"]) == ("interrupted", number.name)


WAITS = """
import signal, time
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(True))
print("waits", flush=True)
while not heard:
    time.sleep(0.05)
print("heard")
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [None, "0"])
def test_a_signal_of_a_shell_reaches_the_command_in_a_job_of_slurm(bench, step):
    """Only what SLURM itself sends to all processes of a step is not handed on (tests/slurm/test_run.py)."""
    of_step = {"SLURM_STEP_ID": step} if step else {}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", **of_step}
    process = bench.start("gpuwatch.cli.main", "run", "--", PYTHON, "-c", WAITS, **job)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGUSR1)

    assert bench.finish(process).stdout == "heard\n"


@pytest.mark.slow
def test_a_rank_is_killed(bench):
    process = started(bench, *waiting(bench))
    rank = bench.running(bench.script("ddp_overflow.py"))
    (victim,) = [one for one in rank if one.environ().get("RANK") == "1"]
    victim.kill()
    ended = bench.finish(process)

    assert ended.code == 1, "as torchrun exits"
    assert (ended.verdict["kind"], ended.verdict["rank"]) == ("lost", 1)
    assert "was killed by SIGKILL" in ended.verdict["statement"]


# -- the variables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "line"), [("shell", "export GPUWATCH_RUN='a folder'"), ("dotenv", "GPUWATCH_RUN=a folder")]
)
def test_the_variables_of_a_run_are_printed(refused, form, line):
    code, stdout, stderr = refused("env", "--format", form, **{RUN_VARIABLE: "a folder"})

    assert code == 0
    assert line in stdout.splitlines()
    assert "gpuwatch run --other-hosts" in stderr


def test_the_variables_are_one_dict(refused, monkeypatch):
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    assert gpuwatch.env() == {}
    variables = {"GPUWATCH_JOIN": "/a/join.json", RUN_VARIABLE: "/a/folder", "PYTHONPATH": "/a/path"}
    code, stdout, stderr = refused("env", "--format", "json", **variables)

    assert (code, json.loads(stdout), stderr) == (0, variables, "")
    assert gpuwatch.env() == variables


# -- what cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (("run",), {}, 2, "expected a command to run, found none"),
        (("run", "--", "no-such-command-anywhere"), {}, 127, "no-such-command-anywhere: command not found"),
        (("run", "--", "mkdirr", "x"), {}, 127, "mkdirr: command not found; did you mean mkdir?"),
        (("run", "--", "./no-such-file"), {}, 127, "./no-such-file: no such file"),
        (("run", "--", "/"), {}, 126, "/: is a directory"),
        (("run", "--", __file__), {}, 126, "permission denied; to run it: gpuwatch run -- python"),
        (("run", "--", "true"), {RUN_VARIABLE: "/dev/shm/some"}, 2, "found one inside another"),
        (("launch", "train.py"), {RUN_VARIABLE: "/dev/shm/some"}, 2, "gpuwatch run -- torchrun"),
        (("run", "--every", "0", "--", "true"), {}, 2, "--every"),
        (("run", "--nnodes", "2", "--", "true"), {}, 2, "--head"),
        (("run", "--preflight", "short", "--", "true"), {}, 2, "--preflight"),
        (
            ("run", "--other-hosts", "--nnodes", "2", "--head", "a", "--node-rank", "0", "--", "true"),
            {},
            2,
            "each host",
        ),
        (("env",), {}, 2, "found no run"),
    ],
)
def test_what_it_refuses_it_says_in_one_sentence(refused, arguments, environment, code, words):
    ended, stdout, stderr = refused(*arguments, **environment)

    assert (ended, stdout) == (code, "")
    assert words in stderr
    assert len(stderr.splitlines()) == 1
    assert not Path("gpuwatch-runs").exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [(PYTHON, "-S"), (PYTHON, "-I"), ("env", "-i", PYTHON)])
def test_ranks_that_cannot_be_seen_are_never_told_clean(bench, command):
    watched = bench.gpuwatch("run", "--", *command, "-c", "print('trained')")

    assert (watched.code, watched.verdict["kind"]) == (6, "unknown")
    assert (
        "no rank was heard from (no Python process below the command was seen to import torch"
        in watched.verdict["statement"]
    )
    assert watched.stdout == "trained\n"


# -- what it leaves as it was -----------------------------------------------------------------------------------

FACTS = "import sys, json; print(json.dumps([sorted(sys.modules), sys.path, [str(type(f)) for f in sys.meta_path]]))"


def facts(folder, **environment):
    """What a Python process finds at its start."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **environment}
    done = subprocess.run(
        [PYTHON, "-c", FACTS], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_process_that_is_no_rank_finds_its_python_as_it_was(tmp_path):
    modules, path, finders = facts(tmp_path)
    with_us = facts(f"{PATH_FOLDER}{os.pathsep}{tmp_path}", **{RUN_VARIABLE: str(tmp_path)})

    assert with_us[:2] == [modules, path]
    assert [finder for finder in with_us[2] if finder not in finders] == ["<class 'sitecustomize._AtTorch'>"]


def test_the_sitecustomize_that_was_there_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import json; json.was_here = __name__")
    modules, path, _ = facts(tmp_path)
    with_us = facts(f"{PATH_FOLDER}{os.pathsep}{tmp_path}", **{RUN_VARIABLE: str(tmp_path)})

    assert with_us[:2] == [modules, path]
    assert "sitecustomize" in modules


def test_the_variable_has_one_name():
    source = Path(gpuwatch.__file__).parent / "worker" / "path" / "sitecustomize.py"
    assert f'_VARIABLE = "{RUN_VARIABLE}"' in source.read_text()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_of_two_processes_that_train_by_themselves_both_are_in_the_report(bench, method):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("by_themselves.py"), "clean", method)

    assert watched.code == 0
    verdict = watched.verdict
    assert (verdict["kind"], verdict["certainty"]) == ("clean", "established")
    assert "1 rank and 1 process that is not a rank, 20 batches" in verdict["statement"]
    assert [(one["rank"], one["batch"]) for one in watched.report["ranks"]] == [(0, 19)]
    (process,) = watched.report["processes"]
    assert (process["rank"] < 0, process["batch"], process["exit"]) == (True, 19, 0)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_of_two_processes_that_train_by_themselves_the_one_that_is_fed_nan_is_named(bench, method):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("by_themselves.py"), "nan", method)

    assert watched.code == 4
    verdict = watched.verdict
    assert (verdict["kind"], verdict["phase"], verdict["value"], verdict["batch"]) == ("overflow", "input", "nan", 10)
    everyone = [*watched.report["ranks"], *watched.report["processes"]]
    (met,) = [one for one in everyone if one["first_anomaly"] is not None]
    assert len(everyone) == 2
    assert met["frames"]
    if met["rank"] < 0:
        assert (verdict["rank"], verdict["pid"]) == (None, met["pid"])
        assert verdict["statement"].startswith(f"Process {met['pid']} (no rank) on ")
        assert f"Process {met['pid']} (no rank), batch 10" in watched.stderr
    else:
        assert (verdict["rank"], verdict["pid"]) == (0, None)


@pytest.mark.slow
def test_a_process_that_could_not_be_watched_keeps_the_run_from_being_clean(bench):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("by_themselves.py"), "no-room", "spawn")

    assert watched.code == 6
    (missing,) = watched.verdict["missing"]
    assert re.match(r"process \d+ was not watched \(no recorder: .*File too large", missing)


@pytest.mark.slow
def test_a_parent_that_is_no_rank_and_is_ended_for_an_overflow_is_in_the_report(bench):
    watched = bench.gpuwatch("run", "--", PYTHON, bench.script("parent_overflows.py"))

    assert watched.code == 4
    verdict = watched.verdict
    assert (verdict["kind"], verdict["rank"], verdict["value"]) == ("overflow", None, "+inf")
    (parent,) = watched.report["processes"]
    assert (verdict["pid"], parent["first_anomaly"]["origin"]) == (parent["pid"], True)
    assert [(rank["rank"], rank["state"]) for rank in watched.report["ranks"]] == [(0, "finished"), (1, "finished")]


@pytest.mark.slow
def test_a_port_that_is_taken_is_the_reason_why_torchrun_failed(bench):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(taken.getsockname()[1]))
        script = bench.script("ddp_overflow.py")
        watched = bench.gpuwatch("run", "--", PYTHON, "-m", "torch.distributed.run", *options, script, *NEVER)

    assert watched.code == 1
    verdict = watched.verdict
    assert (verdict["kind"], verdict["rank"]) == ("crash", None)
    assert verdict["statement"].startswith("The command failed by itself: DistNetworkError: ")
    assert "EADDRINUSE" in verdict["statement"]
    assert "--master-port" in verdict["next"][0]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", pytest.param("launch", marks=pytest.mark.slow)])
def test_a_rank_does_not_have_the_jobs_secret(bench, command):
    script = bench.cwd / "script.py"
    script.write_text("import os; print('GPUWATCH_SECRET' in os.environ)")
    start = ("run", "--", PYTHON) if command == "run" else ("launch", "--preflight", "off", "--nproc-per-node", "1")
    run = bench.gpuwatch(*start, str(script), GPUWATCH_SECRET="a secret that is long enough")

    assert (run.code, run.stdout) == (6, "False\n"), "no module was called"
