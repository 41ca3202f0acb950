"""Following a job, with a SLURM that remembers; and the commands where there is no SLURM."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpuwatch.cli.main import main
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.core.codes import Certainty, VerdictKind
from gpuwatch.core.errors import UsageError
from gpuwatch.slurm.sbatch import JobTask, LocalSlurm, exit_code_of, read_tasks
from gpuwatch.slurm.submission import JobFollower
from msgspec.structs import replace


class FakeSlurm:
    """Answers with one set of tasks after the other; each sleep of the follower brings the next."""

    def __init__(self, *answers: list[JobTask] | None) -> None:
        self._answers = list(answers)
        self.slept: list[float] = []
        self.said: list[str] = []

    def submit(self, script: str, options: list[str]) -> str:
        raise AssertionError("nothing is submitted here")

    def tasks(self, job: str) -> list[JobTask] | None:
        assert job == "17"
        return self._answers[len(self.slept)]

    def follow(self) -> list[JobTask]:
        return JobFollower(self, self.said.append, self.slept.append).follow("17")


def task(state: str, id: str = "17", **more) -> JobTask:
    return JobTask(id, state, **more)


def test_a_job_is_followed_to_its_end():
    end = task("FAILED", nodes="gpu-[1-2]", exit_code=4, reason="NonZeroExitCode")
    slurm = FakeSlurm(
        [task("PENDING", reason="Priority")],
        [task("PENDING", reason="Resources")],
        [task("RUNNING", nodes="gpu-[1-2]", reason="None")],
        [task("RUNNING", nodes="gpu-[1-2]", reason="None")],
        [task("COMPLETING", nodes="gpu-[1-2]")],
        [end],
    )
    assert slurm.follow() == [end]
    assert slurm.said == [
        "job 17: pending (Priority)",
        "job 17: running on gpu-[1-2]",
        "job 17: completing",
        "job 17: failed (NonZeroExitCode)",
    ]


def test_a_requeued_job_is_not_over():
    slurm = FakeSlurm(
        [task("RUNNING")],
        [task("COMPLETING")],
        [task("PENDING", reason="BeginTime")],
        [task("RUNNING")],
        [task("COMPLETED")],
    )
    assert [one.state for one in slurm.follow()] == ["COMPLETED"]
    assert len(slurm.slept) == 4


def test_an_array_is_over_when_all_its_tasks_are():
    slurm = FakeSlurm(
        [task("RUNNING", "17_2"), task("COMPLETED", "17_10")],
        [task("FAILED", "17_2", exit_code=4), task("COMPLETED", "17_10")],
    )
    assert [(one.id, one.exit_code) for one in slurm.follow()] == [("17_2", 4), ("17_10", 0)]


def test_what_slurm_has_forgotten_is_as_it_was_seen_last():
    slurm = FakeSlurm([task("RUNNING")], [])
    assert slurm.follow() == [task("RUNNING")]


def test_a_slurm_that_does_not_answer_is_asked_again_and_that_is_said_once():
    slurm = FakeSlurm([task("RUNNING")], None, None, [task("COMPLETED")])
    assert [one.state for one in slurm.follow()] == ["COMPLETED"]
    assert sum("does not answer" in line for line in slurm.said) == 1


def test_a_long_job_is_looked_at_less_often():
    slurm = FakeSlurm(*[[task("RUNNING")]] * 40, [task("COMPLETED")])
    slurm.follow()
    assert slurm.slept[0] == 1.0
    assert slurm.slept == sorted(slurm.slept)
    assert slurm.slept[-1] == 10.0


def test_what_squeue_prints_is_read():
    """As SLURM 22.05 has printed it."""
    assert read_tasks(
        "78_1|FAILED|768|gpu-1|NonZeroExitCode|\n79_1|PENDING|0||JobHeldUser|\n72|COMPLETED|0|gpu-[1-2]|None|\n"
    ) == [
        JobTask("78_1", "FAILED", "NonZeroExitCode", "gpu-1", 3),
        JobTask("79_1", "PENDING", "JobHeldUser", "", 0),
        JobTask("72", "COMPLETED", "None", "gpu-[1-2]", 0),
    ]


@pytest.mark.parametrize(
    ("text", "code"), [("0", 0), ("1024", 4), ("36608", 143), ("9", 137), ("4:0", 4), ("0:9", 137), ("N/A", 0), ("", 0)]
)
def test_exit_codes_as_wait_and_as_slurm_write_them(text, code):
    assert exit_code_of(text) == code


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, for commands of SLURM that a test writes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_slurm_it_says_what_to_do(commands):
    with pytest.raises(UsageError, match=r"expected SLURM's sbatch on this machine, found none; .*--print"):
        LocalSlurm().submit("#!/bin/sh\n", [])


def test_what_sbatch_refuses_is_said_in_its_own_words(commands):
    write(commands / "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    with pytest.raises(UsageError, match="sbatch rejected the job: Batch job submission failed: Invalid account"):
        LocalSlurm().submit("#!/bin/sh\n", [])


def test_a_job_of_another_cluster_is_looked_for_there(commands):
    write(commands / "sbatch", 'while read -r line; do :; done; echo "17;west"')
    write(commands / "squeue", 'echo "17|RUNNING|0|$1|None|"')
    slurm = LocalSlurm()
    assert slurm.submit("#!/bin/sh\n", ["--clusters=west"]) == "17"
    assert slurm.tasks("17") == [JobTask("17", "RUNNING", "None", "--clusters=west")]


def test_a_job_that_slurm_has_forgotten_and_a_slurm_that_is_away(commands):
    write(commands / "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert LocalSlurm().tasks("17") == []
    write(commands / "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert LocalSlurm().tasks("17") is None


# -- the command --------------------------------------------------------------------------------------------------


@dataclass
class Done:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def gpuwatch(tmp_path, monkeypatch, capsys):
    """The command, in a folder with a script, where there is no SLURM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "my train.py").touch()

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["gpuwatch", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capsys.readouterr())

    return run


def test_print_shows_the_script_and_needs_no_slurm(gpuwatch):
    done = gpuwatch("submit", "--print", "-N2", "--gpus-per-node=8", "my train.py", "--lr", "1")
    assert (done.code, done.stderr) == (0, "")
    assert "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n" in done.stdout
    assert '#SBATCH --job-name="my train"\n' in done.stdout
    assert re.search(r" launch --runs-dir .* 'my train.py' --lr 1 &$", done.stdout, re.MULTILINE)


def test_the_nodes_run_what_is_installed_here_or_what_they_are_told(gpuwatch):
    done = gpuwatch("submit", "--print", "my train.py")
    assert f" {Path(sys.executable).parent}" in done.stdout
    done = gpuwatch("submit", "--print", "--program", "uv run gpuwatch", "my train.py")
    assert "\n    uv run gpuwatch launch " in done.stdout


def test_print_alone_shows_the_template(gpuwatch):
    template = Path(__file__).parents[2] / "slurm" / "gpuwatch.sbatch"
    assert gpuwatch("submit", "--print").stdout == template.read_text()


def test_a_check_as_a_job(gpuwatch):
    done = gpuwatch("check", "--slurm", "-N", "64", "--quick", "--print")
    assert (done.code, done.stderr) == (0, "")
    assert "#SBATCH --nodes=64\n" in done.stdout
    assert re.search(r" check --runs-dir .* --quick &$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["submit"], "expected a script to run, found none"),
        (["submit", "-N2", "no_such.py"], "found no file 'no_such.py'"),
        (["submit", "--every", "0", "my train.py"], "expected a number of batches of 1 or more, or auto, found '0'"),
        (["submit", "--sync", "--on-overflow", "continue", "my train.py"], "expected --on-overflow abort with --sync"),
        (["submit", "--comment", "a\nb", "my train.py"], "--comment: expected a value in one line"),
        (["submit", "--exclude-bad", "nothing", "my train.py"], "expected a run's folder, its name"),
        (["submit", "--program", "", "my train.py"], "--program: expected a command"),
        (["submit", "--program", "it's", "my train.py"], "--program: expected a command"),
        (["check", "--slurm", "-N2", "my train.py"], "check runs no script, found 'my train.py'"),
        (["submit", "my train.py"], "expected SLURM's sbatch on this machine"),
    ],
)
def test_what_cannot_work_is_found_before_the_job_is_in_the_queue(gpuwatch, arguments, sentence):
    done = gpuwatch(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("gpuwatch: ") and done.stderr.count("\n") == 1
    assert sentence in done.stderr


def test_help_says_whose_options_are_taken(gpuwatch):
    done = gpuwatch("submit", "--help")
    assert (done.code, done.stderr) == (0, "")
    assert "Options of sbatch go to sbatch" in done.stdout


def write_report(folder: Path, bad_nodes: list[str]) -> None:
    folder.mkdir(parents=True)
    verdict = Verdict(VerdictKind.LOST, "Gone.", Certainty.SUPPORTED, bad_nodes=bad_nodes)
    report = build_report(fold([]), run_id=folder.name, started=None, ended=None)
    (folder / "report.json").write_bytes(to_json(replace(report, verdict=verdict)))


def test_the_nodes_that_a_run_blames_are_left_out(gpuwatch, tmp_path):
    write_report(tmp_path / "gpuwatch-runs" / "first", ["gpu-7", "gpu-8"])
    write_report(tmp_path / "gpuwatch-runs" / "second", [])
    done = gpuwatch("submit", "--print", "--exclude-bad", "first", "--exclude-bad=second", "-x", "gpu-1", "my train.py")
    assert "#SBATCH --exclude=gpu-1,gpu-7,gpu-8\n" in done.stdout
    assert done.stderr.splitlines() == [
        "gpuwatch: leaving out gpu-7, gpu-8",
        "gpuwatch: the verdict of second blames no node: none is left out",
    ]


def test_a_secret_stays_in_the_batch_script_and_that_is_said(gpuwatch):
    done = gpuwatch("submit", "--print", "my train.py", "--token=hunter2")

    assert (done.code, done.stderr.count("\n")) == (0, 1)
    assert " 'my train.py' --token=hunter2 &\n" in done.stdout
    assert "hunter2" not in done.stderr
    assert "as it was typed, because the job needs it" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("GPUWATCH_ERVY", "3", ("submit", "--print", "my train.py")),
        ("GPUWATCH_EVERY", "x", ("submit", "--print", "my train.py")),
        ("GPUWATCH_ERVY", "3", ("check", "--slurm", "--print")),
    ],
)
def test_a_wrong_variable_is_refused_before_the_job_has_waited(gpuwatch, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    done = gpuwatch(*words)
    assert (done.code, done.stdout) == (2, "")
    assert re.fullmatch(rf"gpuwatch: {variable}: expected .*\n", done.stderr)
