"""SIGKILL to each process of a `gpuwatch run`: nothing stays behind, there is a report, never a wrong clean."""

import signal
import sys
from pathlib import Path

import psutil
import pytest
from gpuwatch.core.recorder.run_folder import RUN_VARIABLE

pytestmark = pytest.mark.slow
PYTHON = sys.executable
HELPERS = {"agent": "gpuwatch.launcher.agent.agent", "collector": "gpuwatch.collector"}


class Watched:
    """A run whose two ranks wait in batch 3 until they are told to go on."""

    def __init__(self, bench, *launcher, script="until_told.py", **environment):
        self._bench = bench
        self._file = bench.cwd / "told"
        script = (bench.script(script), str(self._file))
        self.process = bench.start("gpuwatch.cli.main", "run", "--", *launcher, *script, **environment)
        assert self.process.stdout is not None
        missing = {"rank 0 waits", "rank 1 waits"}
        while missing:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            missing.discard(line.strip())
        environs = [one.environ() for one in bench.running(script[0])]
        (folder,) = {environ[RUN_VARIABLE] for environ in environs if RUN_VARIABLE in environ}
        self.scratch = Path(folder)
        assert self.scratch.is_dir()

    def go_on(self):
        self._file.touch()

    def helper(self, name):
        (process,) = self._bench.running(HELPERS[name])
        return process

    def command(self):
        """What the run has started last: its helpers are there before."""
        return max(psutil.Process(self.process.pid).children(), key=lambda child: (child.create_time(), child.pid))

    def ended(self):
        """The run, once all of its processes have ended."""
        ended = self._bench.finish(self.process)  # nobody holds its output any more
        _, alive = psutil.wait_procs(self._bench.processes(), timeout=120)
        assert alive == []
        return ended


def torchrun():
    return (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def shell(bench, port):
    return ("sh", bench.script("two_ranks_in_background.sh"), str(port), PYTHON)


def shown(bench):
    """What `gpuwatch report` prints afterwards."""
    done = bench.gpuwatch("report")
    assert done.code == 0
    return done.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_is_killed(bench, helper):
    watched = Watched(bench, *torchrun())
    watched.helper(helper).kill()
    watched.go_on()
    ended = watched.ended()

    assert not watched.scratch.exists()
    assert ended.code == 0
    assert (ended.verdict["kind"], ended.verdict["certainty"]) == ("clean", "established")
    assert [(rank["state"], rank["batch"]) for rank in ended.report["ranks"]] == [("finished", 5), ("finished", 5)]
    assert "VERDICT  clean" in shown(bench)


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["torchrun", "shell"])
def test_the_command_is_killed(bench, port, by):
    watched = Watched(bench, *(torchrun() if by == "torchrun" else shell(bench, port)))
    watched.command().kill()
    ended = watched.ended()

    assert not watched.scratch.exists()
    assert ended.code == 128 + signal.SIGKILL
    assert (ended.verdict["kind"], ended.verdict["signal"]) == ("interrupted", "SIGKILL")
    assert [rank["rank"] for rank in ended.report["ranks"]] == [0, 1]
    assert "VERDICT  interrupted" in shown(bench)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("by", "environment"), [("torchrun", {}), ("shell", {}), ("shell", {"STUBBORN": "1"})])
def test_the_run_is_killed(bench, port, by, environment):
    watched = Watched(bench, *(torchrun() if by == "torchrun" else shell(bench, port)), **environment)
    watched.process.kill()
    ended = watched.ended()

    assert not watched.scratch.exists()
    assert (ended.verdict["kind"], ended.verdict["signal"]) == ("interrupted", "SIGKILL")
    assert [(rank["rank"], rank["batch"]) for rank in ended.report["ranks"]] == [(0, 2), (1, 2)]
    assert "VERDICT  interrupted" in shown(bench)


def test_the_run_and_its_agent_are_killed_at_once(bench):
    """What remains is a folder of recorders: the next gpuwatch takes it away."""
    watched = Watched(bench, *torchrun())
    watched.process.send_signal(signal.SIGSTOP)
    watched.helper("agent").kill()
    watched.process.kill()
    ended = watched.ended()

    assert ended.verdict["kind"] != "clean"
    assert [rank["rank"] for rank in ended.report["ranks"]] == [0, 1]
    bench.gpuwatch("run", "--", "true")
    assert not watched.scratch.exists()


def accelerate():
    return (
        PYTHON,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    )


@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("killed", ["run", "agent", "command"])
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_it_is_killed_below_a_frameworks_launcher(bench, framework, killed):
    """Lightning's command is rank 0 itself, and the parent of rank 1."""
    pytest.importorskip(framework)
    watched = (
        Watched(bench, *accelerate())
        if framework == "accelerate"
        else Watched(bench, PYTHON, script="lightning_until_told.py")
    )
    if killed == "agent":
        watched.helper("agent").kill()
        watched.go_on()
    else:
        (watched.process if killed == "run" else watched.command()).kill()
    ended = watched.ended()

    assert not watched.scratch.exists()
    assert [rank["rank"] for rank in ended.report["ranks"]] == [0, 1]
    if killed == "agent":
        assert (ended.code, ended.verdict["kind"], ended.verdict["certainty"]) == (0, "clean", "established")
    elif (framework, killed) == ("lightning", "command"):
        assert (ended.code, ended.verdict["kind"], ended.verdict["rank"]) == (128 + signal.SIGKILL, "lost", 0)
    else:
        assert (ended.verdict["kind"], ended.verdict["signal"]) == ("interrupted", "SIGKILL")
