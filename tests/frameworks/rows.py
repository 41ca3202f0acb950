"""Launchers and frameworks as users run them, each below `gpuwatch run`, and what is asked of each."""

from __future__ import annotations

import importlib.util
import json
import os
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
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2")
FOUR = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "4")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
LIMIT_S = 800.0
PORT = "PORT"
OVERFLOW = 4


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
    """What is first; "" if inf of either sign, or their sum, may be."""
    ranks: int = 2
    bad: int = 1
    """The rank that overflows where one is to."""

    def command(self, rank: int, port: int, watch: Sequence[str] = ()) -> list[str]:
        """`rank` is to overflow; -1: none. `port` is for a launcher that finds none for itself."""
        words = [*self.outer, *watch, *self.launcher, str(SCRIPTS / self.script), *self.arguments, "--rank", str(rank)]
        return [str(port) if word == PORT else word for word in words]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None or shutil.which(self.package) is not None


def _deepspeed(stage: int) -> Row:
    return Row(
        f"DeepSpeed, ZeRO {stage}",
        "deepspeed",
        "deepspeed --num_gpus 2 train.py",
        (PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", PORT),
        "with_deepspeed.py",
        ("--how", str(stage)),
        environment={"DS_ACCELERATOR": "cpu"},
    )


ROWS = [
    Row(
        "accelerate",
        "accelerate",
        "accelerate launch --num_processes 2 train.py",
        (PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"),
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
        "torch's FSDP2 over tensor parallel, four ranks",
        "torch",
        "torchrun --nproc-per-node 4 train.py",
        FOUR,
        "with_fsdp2_tensor_parallel.py",
        ranks=4,
        bad=3,
    ),
    Row(
        "torch's pipeline, four ranks",
        "torch",
        "torchrun --nproc-per-node 4 train.py",
        FOUR,
        "with_pipeline.py",
        module="widen",
        ranks=4,
        bad=2,
    ),
    Row("Ray Train", "ray", "python train.py", (PYTHON,), "with_ray.py"),
]


@dataclass(frozen=True)
class Outcome:
    code: int
    losses: list[str]
    """The lines of all ranks, bit for bit, sorted."""
    first_s: float
    """Until the first of them."""
    text: str


def run_plainly(row: Row, folder: Path, port: int) -> Outcome:
    return run(row, row.command(-1, port), folder)


def run_watched(row: Row, folder: Path, port: int) -> tuple[Outcome, dict[str, Any]]:
    """And the verdict."""
    return run(row, row.command(-1, port, gpuwatch("clean")), folder), verdict(folder, "clean")


def run_to_overflow(row: Row, folder: Path, port: int) -> tuple[Outcome, dict[str, Any]]:
    """Watched, while a rank overflows. And the verdict."""
    return run(row, row.command(row.bad, port, gpuwatch("overflow")), folder), verdict(folder, "overflow")


def gpuwatch(name: str) -> list[str]:
    return [PYTHON, "-m", "gpuwatch.cli.main", "run", "--run-name", name, "--"]


def verdict(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "gpuwatch-runs" / name / "report.json").read_text())["verdict"]


def environment() -> dict[str, str]:
    """This process's, without what a launcher around it has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("GPUWATCH", "SLURM", "PET_"))}


def run(row: Row, command: list[str], folder: Path) -> Outcome:
    told = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", **row.environment}
    began = time.monotonic()
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
        return Outcome(code, sorted(lines), first_s, errors.read())
