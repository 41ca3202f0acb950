"""A SLURM of two nodes for the whole session, and a user who submits to it from a folder of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from cluster import NAME, Cluster, take_down_stale, why_not

from ..waiting import until

SCRIPTS = Path(__file__).parents[1] / "e2e" / "scripts"
TEMPLATE = Path(__file__).parents[2] / "slurm" / "gpuwatch.sbatch"
LOOK_S = 0.1
"""Between two looks at something that only SLURM knows."""
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    take_down_stale()
    cluster = Cluster(f"{NAME}{os.getpid()}")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(cluster.folder)


@dataclass
class Job:
    """A submitted job, or one task of an array of jobs."""

    user: User
    number: str

    @property
    def facts(self) -> dict[str, str]:
        """What `scontrol show job` says, as `JobState`, `ExitCode`."""
        shown = self.user.run("scontrol", "show", "job", "--oneliner", self.number)
        assert shown.returncode == 0, shown.stderr
        return dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))

    @property
    def state(self) -> str:
        return self.facts["JobState"]

    @property
    def output(self) -> str:
        path = Path(self.facts["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, text: str, within_s: float = 600.0) -> None:
        """Returns once `text` is in its output."""
        self.user.until(lambda: text in self.output, f"{text!r} in the job's output", within_s, self)

    def end(self, within_s: float = 600.0) -> str:
        """Its exit code in SLURM, as `4:0`, once it has one."""
        self.user.until(lambda: self.state in OVER, "the end of the job", within_s, self)
        print(self.output)
        return self.facts["ExitCode"]


@dataclass
class User:
    """Somebody at the login node, in a folder that all nodes see."""

    cluster: Cluster
    cwd: Path

    @property
    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in self.cluster.environment.items() if not k.startswith(("GPUWATCH", "TORCHELASTIC"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), clean["PATH"]])
        return {**clean, "PATH": path, "OMP_NUM_THREADS": "1"}

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(list(command), cwd=self.cwd, env={**self.environment, **environment}, timeout=800)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.cluster.login.inside(list(command)),
            cwd=self.cwd,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def gpuwatch(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = self.run(sys.executable, "-m", "gpuwatch.cli.main", *arguments, **environment)
        print(done.stdout, done.stderr)
        return done

    def sbatch(self, *arguments: str, **environment: str) -> Job:
        done = self.run("sbatch", "--parsable", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip())

    def jobs(self) -> list[Job]:
        """All that this user has submitted, in order, tasks of an array one by one."""
        listed = self.run("squeue", "--noheader", "--states=all", "--array", "--format=%F %K %Z").stdout.splitlines()
        rows = [line.split(maxsplit=2) for line in listed]
        mine = [(int(job), task) for job, task, folder in rows if folder == str(self.cwd)]
        return [Job(self, f"{job}_{task}" if task != "N/A" else str(job)) for job, task in sorted(mine)]

    def script(self, name: str) -> str:
        return str(SCRIPTS / name)

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all runs in this folder, oldest first."""
        files = [path for path in self.cwd.rglob("report.json") if "latest" not in path.parts]
        reports = [json.loads(path.read_text()) for path in files]
        return sorted(reports, key=lambda report: report["run"]["started"])

    def report(self) -> dict[str, Any]:
        (report,) = self.reports()
        return report

    def until(self, happened: Callable[[], bool], what: str, within_s: float, job: Job | None = None) -> None:
        until(happened, what, lambda: job.output if job else "", within_s, LOOK_S)


@pytest.fixture
def user(session_cluster: Cluster, tmp_path: Path) -> Iterator[User]:
    """Whose jobs leave nothing behind on the nodes: no process, and no folder in the shared memory."""
    session_cluster.up()
    user = User(session_cluster, tmp_path)
    yield user
    for state in ("PENDING", "RUNNING"):
        user.run("scancel", f"--state={state}", "--user=root")
    user.until(lambda: not user.run("squeue", "--noheader").stdout, "the end of all jobs", 400)
    try:
        user.until(lambda: not session_cluster.left_by_jobs(), "nothing is left by jobs", 60)
    finally:
        left = session_cluster.left_by_jobs()
        session_cluster.clear()
    assert left == []
