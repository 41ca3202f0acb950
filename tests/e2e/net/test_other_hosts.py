"""`gpuwatch run --other-hosts`: ranks of a host that has the run's variables alone are in the one report.

The second host shares files with the first, and nothing else: another network, name, /dev/shm and process table.
"""

import os
import shlex
import signal
import stat
import subprocess
import sys

import pytest
from gpuwatch.launcher.run.command import PATH_FOLDER

from ...waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.sample(2, of="other hosts")]  # of those without a mark of their own
PYTHON = sys.executable
NEVER = ("--rank", "-1", "--batch", "2")
RANKS = """
start() { OMPI_COMM_WORLD_RANK=$1 OMPI_COMM_WORLD_LOCAL_RANK=$2 OMPI_COMM_WORLD_SIZE=4 OMP_NUM_THREADS=1 COMMAND & }
start FIRST 0; first=$!
start SECOND 1; second=$!
wait $first; code=$?
wait $second || code=$?
"""
"""As mpirun starts them."""
HEAD = f"{PYTHON} -m gpuwatch.cli.main env > new.env && mv new.env run.env; {RANKS} exit $code"
HEAD_THAT_FAILS = HEAD.replace("wait $first; code=$?", "wait $second; code=$?; kill $first; wait $first")
"""It ends the ranks of its own host, and reaches no others."""
OTHER = f"""
mount -t tmpfs tmpfs /dev/shm && . ./run.env
{RANKS}
while ps -e -o etime,args | tee -a seen | grep '[l]auncher.run.join' > /dev/null; do sleep 0.1; done
ls -A /dev/shm > left
exit $code
"""
"""The first process of its table: the watcher becomes its child, and must end by itself."""


def ranks(bench, shell, first, script, arguments):
    command = shlex.join([PYTHON, bench.script(script), str(bench.cwd / "store"), *arguments])
    return shell.replace("COMMAND", command).replace("FIRST", str(first)).replace("SECOND", str(first + 1))


class TwoHosts:
    """One `gpuwatch run` on the first, whose command reaches the second."""

    def __init__(self, bench, network, *arguments, options=(), script="own_init.py", shell=HEAD):
        self._bench = bench
        head, other = network(2).nodes
        command = ["sh", "-c", ranks(bench, shell, 0, script, arguments)]
        run = [PYTHON, "-m", "gpuwatch.cli.main", "run", "--other-hosts", *options, "--", *command]
        self.head = self._start(head.inside(run), bench.environment)
        bench.started.append(self.head)
        variables = bench.cwd / "run.env"

        def is_written() -> bool:
            assert self.head.poll() is None, self.head.communicate()
            return variables.exists()

        until(is_written, f"{variables.name}, which the launch on the first node writes")
        self.variables = variables.read_text()
        (self.join,) = (bench.cwd / "gpuwatch-runs").glob("*-*/join.json")
        self.mode = stat.S_IMODE(self.join.stat().st_mode)
        kept = {name: value for name, value in bench.environment.items() if name in ("PATH", "HOME", "TEST_RUN_MARK")}
        others = ranks(bench, OTHER, 2, script, arguments)
        alone = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", others]
        self.other = self._start(other.inside(alone), kept)

    def _start(self, command, environment):
        return subprocess.Popen(
            command, cwd=self._bench.cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ended(self):
        return self._bench.finish(self.other), self._bench.finish(self.head)


def keys_of(join):
    """What must be in no variable and on no command line."""
    text = join.read_text()
    return [word for word in text.split('"') if len(word) == 40]


def test_they_are_in_the_one_report(bench, network):
    hosts = TwoHosts(bench, network, *NEVER)
    keys = keys_of(hosts.join)
    other, head = hosts.ended()

    assert (other.code, head.code) == (0, 0), other.stderr
    assert "unwatched" not in other.stderr
    assert (head.verdict["kind"], head.verdict["certainty"]) == ("clean", "established")
    assert [(rank["rank"], rank["host"]) for rank in head.report["ranks"]] == [
        (0, "node-0"),
        (1, "node-0"),
        (2, "node-1"),
        (3, "node-1"),
    ]
    assert (bench.cwd / "left").read_text() == "", "of the second host's /dev/shm"
    assert hosts.mode == 0o600
    assert not hosts.join.exists(), "nobody joins a run that is over"
    assert len(keys) == 3
    assert not [key for key in keys if key in hosts.variables or key in (bench.cwd / "seen").read_text()]


@pytest.mark.sample(1)
def test_the_first_rank_is_named_on_the_other_host(bench, network):
    _, head = TwoHosts(bench, network, "--rank", "3", "--batch", "2").ended()

    assert head.code == 4
    verdict = head.verdict
    assert (verdict["kind"], verdict["rank"], verdict["host"]) == ("overflow", 3, "node-1")
    assert (verdict["module"], verdict["certainty"]) == ("block.widen", "established")


def test_they_end_when_the_command_has_failed(bench, network):
    """They wait for ever, and nothing but gpuwatch reaches them."""
    (bench.cwd / "store").mkdir()
    other, head = TwoHosts(bench, network, script="left_alone.py", shell=HEAD_THAT_FAILS).ended()

    assert (head.code, other.code) == (1, 128 + signal.SIGTERM)
    verdict = head.verdict
    assert (verdict["kind"], verdict["rank"], verdict["host"]) == ("crash", 1, "node-0")
    assert [rank["rank"] for rank in head.report["ranks"]] == [0, 1, 2, 3]
    assert (bench.cwd / "left").read_text() == "", "of the second host's /dev/shm"


def test_they_are_tested_together_before_they_train(bench, network):
    other, head = TwoHosts(bench, network, *NEVER, options=("--preflight", "quick")).ended()

    assert (other.code, head.code) == (0, 0), other.stderr
    assert "gpuwatch" not in other.stderr, "nothing was left out, and nobody is unwatched"
    assert (head.verdict["kind"], head.verdict["certainty"]) == ("clean", "established")
    assert "gpuwatch: preflight ok: 4 ranks on 2 nodes" in head.stderr
    found = [{stage["stage"]: stage["grade"] for stage in rank["preflight"]["stages"]} for rank in head.report["ranks"]]
    assert [stages["cross group"] for stages in found] == 4 * ["ok"]


def test_a_host_without_the_runs_folder_says_so_and_goes_on(bench):
    """Its variables name a file that is not there."""
    environment = {
        "GPUWATCH_RUN": "/dev/shm/of-another-host",
        "GPUWATCH_JOIN": str(bench.cwd / "join.json"),
        "PYTHONPATH": os.pathsep.join([PATH_FOLDER, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [PYTHON, bench.script("alone.py")],
        env={**bench.environment, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 4
    assert "goes on unwatched" in done.stderr
    assert "share it, or copy that file here" in done.stderr
    assert len(done.stderr.splitlines()) == 1
