"""Launchers and frameworks as users run them, each below `gpuwatch run`, and the answers expected of each."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = sys.executable
LIMIT_S = 800.0
PORT, RANKS = "PORT", "RANKS"
"""Words of a command that stand for a number."""
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", RANKS)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", RANKS)
OVERFLOW = 4
SIZES = (2, 4)
HEAD = (
    "framework",
    "command",
    "same bits",
    "same exit code, clean",
    "first of two ranks",
    "first of four",
    "module named",
    "first loss",
    "processors",
)
"""Columns of the table in docs/frameworks.md. The last two are seconds, plainly and watched: until a rank prints a
first loss, and of all processors in the whole run."""


@dataclass(frozen=True)
class Row:
    name: str
    package: str
    shown: str
    """What the user types."""
    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()
    module: str = "block.widen"
    environment: dict[str, str] = field(default_factory=dict)
    outer: tuple[str, ...] = ()
    """What stands before gpuwatch itself."""
    value: str = "+inf"
    """The first bad value; "" if inf of either sign, or their sum, may be first."""
    breaks_weight: bool = False
    """The fault breaks a weight of which each rank has a copy. Among more than two, the copies show the odd one."""
    sizes: tuple[int, ...] = SIZES
    """Numbers of ranks to try it with."""

    def command(self, ranks: int, rank: int, port: int, watch: Sequence[str] = ()) -> list[str]:
        """`rank` is to overflow; -1: none. `port` is for a launcher that finds none for itself."""
        told = ("--ranks", str(ranks), "--rank", str(rank))
        words = [*self.outer, *watch, *self.launcher, str(SCRIPTS / self.script), *self.arguments, *told]
        return [{PORT: str(port), RANKS: str(ranks)}.get(word, word) for word in words]

    def phase(self, ranks: int) -> str:
        """In which the overflow is said to be."""
        return "weight" if self.breaks_weight and ranks > 2 else "forward"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None or shutil.which(self.package) is not None


RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    **dict.fromkeys(
        (
            "RAY_gcs_server_port_wait_time_s",
            "RAY_gcs_server_request_timeout_seconds",
            "RAY_raylet_start_wait_time_s",
            "RAY_worker_register_timeout_seconds",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S",
        ),
        "300",
    ),
}
"""Its deadlines are for a machine that does nothing else."""


def _deepspeed(stage: int) -> Row:
    return Row(
        f"DeepSpeed, ZeRO {stage}",
        "deepspeed",
        "deepspeed --num_gpus 2 train.py",
        (PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", RANKS, "--master_port", PORT),
        "with_deepspeed.py",
        ("--how", str(stage)),
        environment={"DS_ACCELERATOR": "cpu"},
    )


ROWS = [
    Row(
        "accelerate",
        "accelerate",
        "accelerate launch --num_processes 2 train.py",
        (
            PYTHON,
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            RANKS,
            "--main_process_port",
            "0",
        ),
        "with_accelerate.py",
    ),
    Row("accelerate", "accelerate", "torchrun train.py", TORCHRUN, "with_accelerate.py"),
    Row(
        "transformers' Trainer",
        "accelerate",
        "torchrun train.py",
        TORCHRUN,
        "with_trainer.py",
        module="net.block.widen",
    ),
    Row(
        "Lightning, ddp",
        "lightning",
        "python train.py",
        (PYTHON,),
        "with_lightning.py",
        ("--how", "ddp"),
        "net.block.widen",
    ),
    Row(
        "Lightning, ddp_spawn",
        "lightning",
        "python train.py",
        (PYTHON,),
        "with_lightning.py",
        ("--how", "ddp_spawn"),
        "net.block.widen",
    ),
    Row(
        "peft, LoRA",
        "peft",
        "torchrun train.py",
        TORCHRUN,
        "with_peft.py",
        module="base_model.model.block.widen.base_layer",
    ),
    Row(
        "trl's SFTTrainer",
        "trl",
        "torchrun train.py",
        TORCHRUN,
        "with_trl.py",
        module="transformer.h.0.mlp.c_fc",
        value="",
        breaks_weight=True,
    ),
    Row("Open MPI", "mpirun", "mpirun -n 2 python train.py", (*MPIRUN, PYTHON), "with_mpi.py", ("--how", PORT)),
    Row(
        "Open MPI, a task for each rank",
        "mpirun",
        "mpirun -n 2 gpuwatch run -- python train.py",
        (PYTHON,),
        "with_mpi.py",
        ("--how", PORT),
        outer=MPIRUN,
    ),
    _deepspeed(1),
    _deepspeed(2),
    _deepspeed(3),
    Row(
        "torch's FSDP2 over tensor parallel",
        "torch",
        "torchrun --nproc-per-node 4 train.py",
        TORCHRUN,
        "with_fsdp2_tensor_parallel.py",
        sizes=(4,),
    ),
    Row("torch's pipeline", "torch", "torchrun train.py", TORCHRUN, "with_pipeline.py", module="widen"),
    Row("Ray Train", "ray", "python train.py", (PYTHON,), "with_ray.py", environment=RAY),
]


@dataclass(frozen=True)
class Outcome:
    code: int
    losses: list[str]
    """The lines of all ranks, bit for bit, sorted."""
    first_s: float
    """Until the first of them."""
    processors_s: float
    """Processor time of all its processes that were waited for."""
    text: str


def bad_of(ranks: int) -> int:
    """The rank that overflows where one is to: never rank 0."""
    return ranks // 2


def run_plainly(row: Row, ranks: int, folder: Path, port: int) -> Outcome:
    return run(row, row.command(ranks, -1, port), folder)


def run_watched(row: Row, ranks: int, folder: Path, port: int, *options: str) -> tuple[Outcome, dict[str, Any]]:
    """And the verdict. `options` are gpuwatch's."""
    return run(row, row.command(ranks, -1, port, gpuwatch("clean", *options)), folder), verdict(folder, "clean")


def run_to_overflow(row: Row, ranks: int, folder: Path, port: int) -> tuple[Outcome, dict[str, Any]]:
    """Watched, while a rank overflows. And the verdict."""
    outcome = run(row, row.command(ranks, bad_of(ranks), port, gpuwatch("overflow")), folder)
    return outcome, verdict(folder, "overflow")


def gpuwatch(name: str, *options: str) -> list[str]:
    return [PYTHON, "-m", "gpuwatch.cli.main", "run", "--run-name", name, *options, "--"]


def report(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "gpuwatch-runs" / name / "report.json").read_text())


def verdict(folder: Path, name: str) -> dict[str, Any]:
    return report(folder, name)["verdict"]


def environment() -> dict[str, str]:
    """This process's, without what a launcher around it has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("GPUWATCH", "SLURM", "PET_"))}


def run(row: Row, command: list[str], folder: Path) -> Outcome:
    told = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **row.environment}
    began, used_s = time.monotonic(), _used_by_children_s()
    with (
        (folder / "errors").open("w+") as errors,
        subprocess.Popen(
            command, cwd=folder, env={**environment(), **told}, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        first_s, lines = 0.0, []
        try:
            for line in process.stdout:
                if line.startswith("rank "):
                    first_s = first_s or time.monotonic() - began
                    lines.append(line.strip())
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
        errors.seek(0)
        return Outcome(code, sorted(lines), first_s, _used_by_children_s() - used_s, errors.read())


def _used_by_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
