"""Whole jobs: `gpuwatch launch` of a script, and what its report says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .lines import Row, first_line, passed
from .model import BAD_MODULE

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "train.py"
EXAMPLE = HERE.parents[1] / "examples" / "train_notes.py"
_TIMEOUT_S = 240
_OVERFLOW = 4
PREFLIGHT_MOST_S = 10.0


@dataclass(frozen=True)
class Job:
    """How a job ended."""

    code: int
    seconds: float
    report: dict[str, Any]
    stdout: str
    stderr: str

    @property
    def verdict(self) -> dict[str, Any]:
        """The report's, {} if there is no report."""
        found: dict[str, Any] = self.report.get("verdict", {})
        return found

    @property
    def story(self) -> str:
        """In one line."""
        statement = self.verdict.get("statement") or (self.stderr.strip().splitlines() or ["no output"])[-1]
        return first_line(f"exit code {self.code}: {statement}")


def launch(
    *options: str,
    script: Path = SCRIPT,
    arguments: tuple[str, ...] = (),
    nproc: int = 1,
) -> Job:
    """Run a job in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="gpuwatch-acceptance-") as folder:
        command = [sys.executable, "-m", "gpuwatch.cli.main", "launch", "--standalone", "--nproc-per-node", str(nproc)]
        began = time.monotonic()
        done = _run([*command, *options, str(script), *arguments], folder)
        seconds = time.monotonic() - began
        file = Path(folder, "gpuwatch-runs", "latest", "report.json")
        report = json.loads(file.read_text()) if file.is_file() else {}
    return Job(done.returncode, seconds, report, done.stdout, done.stderr)


def torchrun(*arguments: str, nproc: int = 1) -> str:
    """What the script prints without gpuwatch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    with tempfile.TemporaryDirectory(prefix="gpuwatch-acceptance-") as folder:
        done = _run([*command, str(SCRIPT), *arguments], folder)
    if done.returncode:
        raise RuntimeError(f"torchrun of {SCRIPT.name} ended with {done.returncode}: {done.stderr[-300:]}")
    return done.stdout


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)


# -- an overflow, named ---------------------------------------------------------------------------------------------


def place_of(verdict: dict[str, Any]) -> str:
    """What was found, and where."""
    value, rank, batch = verdict.get("value"), verdict.get("rank"), verdict.get("batch")
    return f"{value} in {verdict.get('module') or 'the model'}, rank {rank}, batch {batch}"


def named_right(what: str, job: Job, batch: int, *, rank: int = 0, bad: str = BAD_MODULE, inside: bool = True) -> Row:
    """Rank, module, value and batch. `inside` False: a module around it will do, as nothing in it was read."""
    verdict = job.verdict
    module = verdict.get("module") or ""
    right_module = module == bad if inside else bad.startswith(module)
    good = (
        job.code == _OVERFLOW
        and verdict.get("kind") == "overflow"
        and (verdict.get("rank"), verdict.get("batch")) == (rank, batch)
        and right_module
        and (verdict.get("value") == "+inf" or not inside)
    )
    place = bad if inside else f"{bad} or a module around it"
    target = f"{'+inf' if inside else 'a non-finite value'} in {place}, rank {rank}, batch {batch}"
    return Row(what, passed(good), place_of(verdict), target, "" if good else job.story)


PLACES = {"forward": "grow", "loss": None, "backward": "norm", "optimizer": "enter"}
"""Phase -> the module of three_places.py that is to be named. The loss is in none."""

OVERFLOWS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, bool]] = {
    "plain": ((), (), 7, True),
    "--sync": (("--sync",), (), 7, True),
    "--every 10, in a batch that is looked at": (("--every", "10"), (), 10, True),
    "--every 10, in a batch left out": (("--every", "10"), (), 13, False),
    "fused AdamW and GradScaler": ((), ("--fused-scaler",), 7, True),
    "fused AdamW and GradScaler, --sync": (("--sync",), ("--fused-scaler",), 7, True),
    "--guard-optimizer": (("--guard-optimizer",), ("--fused-scaler",), 7, True),
}
"""name -> options of launch, arguments of the script, the batch, whether the very module must be named"""


def overflow(device: torch.device) -> Iterator[Row]:
    """An fp16 overflow is named, whatever the options."""
    for name, (options, arguments, batch, inside) in OVERFLOWS.items():
        job = launch("--preflight", "off", *options, arguments=("--bad-batch", str(batch), *arguments))
        yield named_right(f"fp16 overflow, {name}", job, batch, inside=inside)
    job = launch("--preflight", "off", arguments=("--fused-scaler",))
    clean = job.code == 0 and job.verdict.get("kind") == "clean"
    yield Row("no overflow is clean", passed(clean), str(job.verdict.get("kind")), "clean", job.story)


def places(device: torch.device) -> Iterator[Row]:
    """The phase and the module are named; on a device the operation or its line may be unknown, which is told."""
    for phase, module in PLACES.items():
        job = launch("--preflight", "off", script=HERE / "three_places.py", arguments=(phase,))
        verdict = job.verdict
        found = tuple(verdict.get(key) for key in ("kind", "phase", "module", "rank", "batch"))
        operation = verdict.get("operation") or {}
        line = operation.get("code") or f"{operation.get('op') or 'an operation'}: its line is not known"
        good = job.code == _OVERFLOW and found == ("overflow", phase, module, 0, 3)
        target = f"{phase} of `{module}`, batch 3" if module else f"{phase}, batch 3"
        yield Row(f"an overflow, {phase}", passed(good), f"{line}", target, "" if good else job.story)
    job = launch("--preflight", "off", script=HERE / "three_places.py", arguments=("none",))
    kind = str(job.verdict.get("kind"))
    yield Row("the same without an overflow", passed((job.code, kind) == (0, "clean")), kind, "clean", job.story)


def several(mode: str, device: torch.device) -> Iterator[Row]:
    """DDP or FSDP2 over all GPUs, on the CPU over two ranks: the last rank overflows."""
    nproc = torch.cuda.device_count() if device.type == "cuda" else 2
    if nproc < 2:
        yield Row(mode.upper(), "skipped", note=f"needs 2 GPUs or more, found {nproc}")
        return
    bad = nproc - 1
    arguments = ("--mode", mode, "--bad-batch", "7", "--bad-rank", str(bad))
    job = launch("--preflight", "quick", arguments=arguments, nproc=nproc)
    clean = launch("--preflight", "off", arguments=("--mode", mode), nproc=nproc)
    kind = clean.verdict.get("kind")
    yield named_right(f"{mode.upper()} over {nproc} ranks, fp16 overflow", job, 7, rank=bad)
    good = clean.code == 0 and kind == "clean"
    yield Row(f"{mode.upper()} over {nproc} ranks, clean", passed(good), str(kind), "clean", clean.story)


def ddp(device: torch.device) -> Iterator[Row]:
    """See `several`."""
    yield from several("ddp", device)


def fsdp2(device: torch.device) -> Iterator[Row]:
    """See `several`."""
    yield from several("fsdp2", device)


def hang(device: torch.device) -> Iterator[Row]:
    """Rank 1 sleeps where rank 0 waits for its device, in several ways."""
    if torch.cuda.device_count() < 2:
        yield Row("a hang over NCCL", "skipped", note=f"needs 2 GPUs or more, found {torch.cuda.device_count()}")
        return
    for way in ("float", "to", "backward", "ddp"):
        options = ("--preflight", "off", "--hang-timeout", "20", "--on-hang", "abort")
        job = launch(*options, script=HERE / "waits.py", arguments=(way, "sleep"), nproc=2)
        found = tuple(job.verdict.get(key) for key in ("kind", "rank", "certainty"))
        text = ", ".join(map(str, found))
        good = found == ("hang", 1, "established")
        yield Row(f"rank 1 sleeps, rank 0 waits ({way})", passed(good), text, "hang, 1, established", job.story)


def example(device: torch.device) -> Iterator[Row]:
    """examples/train_notes.py: the last rank has a sample that is out of scale."""
    nproc = min(2, torch.cuda.device_count()) if device.type == "cuda" else 2
    job = launch("--preflight", "off", script=EXAMPLE, nproc=nproc)
    yield named_right(f"examples/train_notes.py, {nproc} ranks", job, 20, rank=nproc - 1, bad="spectrum")


# -- the preflight --------------------------------------------------------------------------------------------------


def preflight(device: torch.device) -> Iterator[Row]:
    """Its seconds, stage by stage; and that all of it passes."""
    nproc = max(1, torch.cuda.device_count()) if device.type == "cuda" else 2
    for mode in ("quick", "full"):
        job = launch("--preflight", mode, arguments=("--batches", "2"), nproc=nproc)
        ranks = job.report.get("ranks", [])
        stages = ranks[0]["preflight"]["stages"] if ranks else []
        good = job.code == 0 and bool(ranks) and all(rank["preflight"]["outcome"] == "ok" for rank in ranks)
        spent = sum(stage["seconds"] for stage in stages)
        has_target = mode == "quick" and device.type == "cuda"
        target = f"at most {PREFLIGHT_MOST_S:g} s" if has_target else ""
        told = ", ".join(f"{stage['stage']} {stage['seconds']:.2f}" for stage in stages)
        good = good and (not has_target or spent <= PREFLIGHT_MOST_S)
        what = f"preflight, {mode}, {nproc} rank{'s' * (nproc > 1)}"
        yield Row(what, passed(good), f"{spent:.2f} s", target, told if job.code == 0 else job.story)
