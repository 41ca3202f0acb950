"""A folder in which a job runs as a user may have left it, and the same job under torchrun alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LIGHT_RANK = Path(__file__).parents[1] / "sweep" / "light_rank.py"
MARK = "TEST_RUN_MARK"
TIMEOUT_S = 240
_REMOVED = ("GPUWATCH", "TORCHELASTIC", "PET_", "SLURM")
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = ["gpuwatch", "launch", "--preflight", "off", "--standalone", "--nproc-per-node", "2"]
RUN = ["gpuwatch", "run", "--", sys.executable, "-m", *TORCHRUN]


@dataclass
class Place:
    """Where the commands run, and what they find in their environment."""

    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(
        self, module: list[str], arguments: list[str | bytes], *, under: list[str] | None = None, **how: Any
    ) -> subprocess.Popen[bytes]:
        """`under` is a command that runs the rest of its line, `how` as for Popen."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_REMOVED)}
        return subprocess.Popen(
            [*(under or []), sys.executable, "-m", *module, *arguments],
            cwd=self.cwd,
            env={**clean, MARK: self.mark, "OMP_NUM_THREADS": "1", **self.env},
            **how,
        )

    def script(self, *arguments: str) -> list[str | bytes]:
        return [str(LIGHT_RANK), *arguments]

    def losses(self) -> dict[str, str]:
        """What the ranks have written at their end; removed with all that a job writes, but for gpuwatch's runs."""
        found = {path.name: path.read_text() for path in sorted(self.cwd.glob("losses-*"))}
        for path in [*self.cwd.glob("losses-*"), *self.cwd.glob("here-*")]:
            path.unlink()
        return found

    def verdict(self) -> dict[str, Any]:
        """The verdict of the latest run; the runs are removed."""
        runs = self.cwd / "gpuwatch-runs"
        verdict = json.loads((runs / "latest" / "report.json").read_bytes())["verdict"]
        shutil.rmtree(runs)
        assert isinstance(verdict, dict)
        return verdict

    def left(self) -> list[str]:
        """Command lines of what does not end; it is killed."""
        found = [process for process in psutil.process_iter() if self._is_ours(process)]
        _, alive = psutil.wait_procs(found, timeout=60)
        lines = [" ".join(process.cmdline()) for process in alive]
        for process in alive:
            process.kill()
        return lines

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def finish(process: subprocess.Popen[bytes], meanwhile: Callable[[], object] = lambda: None) -> int:
    """Its exit code."""
    try:
        meanwhile()
        return process.wait(TIMEOUT_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
