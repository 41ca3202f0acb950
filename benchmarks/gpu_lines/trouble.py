"""What goes wrong on a GPU without any overflow: no memory, an assertion, too many ranks; and what NVML says of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import torch

from .jobs import HERE, launch, named_right
from .lines import Row, first_line, passed
from .model import ALL, PLAIN, Task, deterministic, digest_of, watched

_SCRIPT = HERE / "asserts.py"
_NVIDIA_SMI_S = 60


def one_gpu(device: torch.device) -> Iterator[Row]:
    """FSDP2 with one rank; and two ranks on one GPU: the preflight warns, and the script's own error names the rank."""
    arguments = ("--mode", "fsdp2", "--bad-batch", "7")
    yield named_right("FSDP2, one rank, fp16 overflow", launch("--preflight", "off", arguments=arguments), 7)
    if torch.cuda.device_count() != 1:
        yield Row(
            "two ranks on one GPU", "skipped", note=f"needs a machine with one, found {torch.cuda.device_count()}"
        )
        return
    job = launch("--preflight", "quick", arguments=("--batches", "2"), nproc=2)
    verdict = job.verdict
    warned = "rank 1" in job.stderr and "has no GPU of its own" in job.stderr
    advised = any("no more ranks on a node than it has GPUs" in step for step in verdict.get("next", []))
    good = (verdict.get("kind"), verdict.get("rank")) == ("crash", 1) and warned and advised
    figure = f"{verdict.get('kind')}, rank {verdict.get('rank')}{', warned' if warned else ''}"
    yield Row("two ranks on one GPU", passed(good), figure, "crash, rank 1, warned by the preflight", job.story)


def no_memory(device: torch.device) -> Iterator[Row]:
    """torch raises it to the script, which goes on: with the same weights as without gpuwatch."""
    deterministic()
    digests = {how: _with_too_much(device, how) for how in (PLAIN, ALL)}
    what = "the same weights after torch.OutOfMemoryError was caught"
    yield Row(what, passed(digests[ALL] == digests[PLAIN]), digests[ALL], f"{digests[PLAIN]} without")


def _with_too_much(device: torch.device, how: str) -> str:
    task = Task("tiny", device, "bf16")
    too_much = torch.cuda.get_device_properties(device).total_memory * 2
    with watched(how, task.net):
        for _ in range(3):
            task.step()
            try:
                torch.empty(too_much, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                continue
            raise AssertionError(f"expected no room for {too_much} bytes")
        torch.cuda.synchronize(device)
    return digest_of(task.net)


def device_assert(device: torch.device) -> Iterator[Row]:
    """An index that is out of range ends the CUDA context: the job ends as a crash, and gpuwatch does not hang."""
    job = launch("--preflight", "off", script=_SCRIPT)
    verdict = job.verdict
    good = job.code != 0 and (verdict.get("kind"), verdict.get("rank")) == ("crash", 0)
    yield Row("an assertion on the device", passed(good), f"{verdict.get('kind')}", "crash, rank 0", job.story)


def health(device: torch.device) -> Iterator[Row]:
    """NVML in a process of its own, as the preflight asks it, beside nvidia-smi."""
    from gpuwatch.core.gpu.nvml_child import ask_nvml

    answer = ask_nvml([], 60.0)
    readings = answer.readings.values()
    names = sorted(reading.name for reading in readings)
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Row("GPUs by NVML", "told", ", ".join(names), note="there is no nvidia-smi to compare with")
    else:
        command = [smi, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S)
        expected = sorted(line.strip() for line in done.stdout.splitlines() if line.strip())
        yield Row("GPUs by NVML", passed(names == expected), ", ".join(names), f"{', '.join(expected)} by nvidia-smi")
    for reading in readings:
        unknown = sorted(reading.unknown)
        note = f"unknown: {', '.join(unknown)}; {first_line(reading.unknown[unknown[0]])}" if unknown else ""
        yield Row(f"facts of {reading.name}", "told", f"{len(reading.values)} known, {len(unknown)} unknown", "", note)
