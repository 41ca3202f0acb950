"""A job of ends.py on a real SLURM of two nodes (tests/slurm/cluster.py), and what SLURM or a node does to it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__:
    from .named_after import TimedLine, fault_s, named_after_s
    from .ways import WAYS, BadEnd, EndedJob, grade, grade_node, ranks_at_fault, text_of
else:
    from named_after import TimedLine, fault_s, named_after_s
    from ways import WAYS, BadEnd, EndedJob, grade, grade_node, ranks_at_fault, text_of

_ROOT = Path(__file__).parents[2]
_JOB = _ROOT / "tests" / "e2e" / "scripts" / "bad_ends.py"
_TEMPLATE = _ROOT / "slurm" / "gpuwatch.sbatch"
_PATIENCE_S = 300
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_BY_THE_SCRIPT = {way.how for way in WAYS}
_OF_RUN = "SIGTERM to the step of gpuwatch run"
_LOST_NODE = 1
"""The collector is on the other one."""


@contextmanager
def cluster() -> Iterator[Any]:
    """A cluster of its own, for root, where `why_not` is ""."""
    found = _module().Cluster(f"{_module().NAME}{os.getpid()}ends")
    try:
        found.up()
        yield found
    finally:
        found.down()
        shutil.rmtree(found.folder)


def why_not() -> str:
    """Why there can be no SLURM here; "" if there can."""
    return str(_module().why_not())


def _module() -> Any:
    sys.path.insert(0, str(_ROOT / "tests" / "slurm"))
    return importlib.import_module("cluster")


def run(slurm: Any, way: BadEnd, guilty: int, nproc: int) -> EndedJob:
    """Submit one, do to it what the script does not do itself, and grade what the report says."""
    with tempfile.TemporaryDirectory(prefix="gpuwatch-ends-") as name:
        folder = Path(name)
        slurm.up()
        began = time.monotonic()
        job = SlurmEnd(slurm, folder, way, guilty, nproc)
        try:
            job.follow()
        finally:
            job.clear()
        seconds = time.monotonic() - began
        reports = list(folder.glob("gpuwatch-runs/*-*/report.json"))
        if len(reports) != 1:
            said = "".join(text for _, text in job.lines)
            return EndedJob(way, guilty, nproc, "wrong", seconds, f"{len(reports)} reports: {said[-300:]}")
        verdict = json.loads(reports[0].read_text())["verdict"]
        fault = fault_s(folder)
        at_fault = job.ranks_of_node() if way.blames == "node" else ranks_at_fault(way, guilty, nproc)
        host = slurm.nodes[_LOST_NODE].host
    is_node = way.blames == "node"
    graded = grade_node(way, host, at_fault, verdict) if is_node else grade(way, guilty, nproc, verdict)
    to_name_s = named_after_s(job.lines, fault, at_fault) if fault is not None else None
    return EndedJob(way, guilty, nproc, graded, seconds, text_of(verdict), verdict["kind"], to_name_s)


class SlurmEnd:
    """One job, from its submission to its end."""

    def __init__(self, slurm: Any, folder: Path, way: BadEnd, guilty: int, nproc: int) -> None:
        self._slurm, self._folder, self._way, self._nproc = slurm, folder, way, nproc
        self.lines: list[TimedLine] = []
        """What it has told, and when that could be read."""
        self._output, self._unread = folder / "job.out", ""
        self._read_to = 0
        how = way.how if way.how in _BY_THE_SCRIPT else "runs on"
        options = ["--nodes=2", f"--gpus-per-node={nproc // 2}", "--no-requeue", f"--output={self._output}"]
        if way.how == "time limit":
            options += ["--time=1", "--signal=USR2@10"]
        script = [str(_TEMPLATE), "--preflight", "off", str(_JOB), how, str(guilty)]
        if way.how == _OF_RUN:
            options += [f"--ntasks-per-node={nproc // 2}"]
            script = ["--wrap", f"srun bash -c {_run_command(how, guilty)}"]
        self._is_done = way.how in _BY_THE_SCRIPT or way.how == "time limit"
        done = slurm.run(["sbatch", "--parsable", *options, *script], cwd=folder, env=self._environment)
        assert done.returncode == 0, done.stderr
        self._number = done.stdout.strip()

    @property
    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), self._slurm.environment["PATH"]])
        return {**self._slurm.environment, "PATH": path, "OMP_NUM_THREADS": "1"}

    def follow(self) -> None:
        """Read what it tells until it is over, and act once its ranks are under way."""
        deadline, looked = time.monotonic() + _PATIENCE_S, 0.0
        while True:
            now = time.monotonic()
            self._read()
            if not self._is_done and len(self._under_way()) == self._nproc:
                self._is_done = True
                _tell_fault(self._folder)
                self._act()
            if now > deadline:
                self._slurm.run(["scancel", self._number])
                deadline += _PATIENCE_S
            if now - looked > 0.5:
                looked = now
                state = self._slurm.run(["squeue", "-h", "-t", "all", "-j", self._number, "-o", "%T"]).stdout.strip()
                if state in _OVER:
                    break
            time.sleep(0.05)
        self._read()

    def ranks_of_node(self) -> set[int]:
        """The ranks on the node that was lost."""
        host = self._slurm.nodes[_LOST_NODE].host
        return {rank for rank, found in self._under_way().items() if found == host}

    def clear(self) -> None:
        """Nothing of it runs on."""
        self._slurm.run(["scancel", self._number])
        self._slurm.clear()

    def _act(self) -> None:
        slurm, node = self._slurm, self._slurm.nodes[_LOST_NODE]
        down = ["scontrol", "update", f"nodename={node.host}", "state=down", "reason=ends"]
        {
            "scancel": lambda: slurm.run(["scancel", self._number]),
            _OF_RUN: lambda: slurm.run(["scancel", "--signal=TERM", f"{self._number}.0"]),
            "power off": lambda: slurm.power_off(node),
            "link cut": lambda: slurm.network.cut_off(node),
            "slurmd killed": lambda: slurm.kill_slurmd(node),
            "node down": lambda: (slurm.kill_slurmd(node), slurm.run(down)),  # it would come back at once
        }[self._way.how]()

    def _under_way(self) -> dict[int, str]:
        """rank -> its host"""
        found = {path: re.fullmatch(r"under-way-(\d+)", path.name) for path in self._folder.glob("under-way-*")}
        return {int(match[1]): path.read_text() for path, match in found.items() if match is not None}

    def _read(self) -> None:
        if not self._output.exists():
            return
        with self._output.open("rb") as output:
            output.seek(self._read_to)
            data = output.read()
        self._read_to += len(data)
        *whole, self._unread = (self._unread + data.decode(errors="replace")).split("\n")
        self.lines += [(time.time(), f"{line}\n") for line in whole]


def _run_command(how: str, guilty: int) -> str:
    """A task of srun that is one rank, below a `gpuwatch run` of its own."""
    ranks = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=node-0 MASTER_PORT=29551"
    return f"'{ranks} exec gpuwatch run --preflight off -- python {_JOB} \"{how}\" {guilty}'"


def _tell_fault(folder: Path) -> None:
    (folder / "fault-0").write_text(str(time.time()))
