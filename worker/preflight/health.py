"""The health stage of one rank: what NVML says of its GPU while the GPU is at work, against the table of thresholds.

It runs in a child of the coordinator's; NVML is read in a process of its own, so that a driver that hangs costs the
stage its deadline and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.gpu_health.child import ask_nvml
from ...core.gpu_health.grade import grade_answer
from ...core.gpu_health.thresholds import load_thresholds
from ...core.preflight import Finding

_LOAD_SIZE = 4096
_TRANSFER_BYTES = 64 << 20


@dataclass(frozen=True)
class HealthResult:
    """What was found, and one line of what was looked at."""

    findings: list[Finding]
    detail: str


def gpu_of_rank(uuid: str, local_rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """UUID of the rank's GPU: as CUDA tells it, or else the one that CUDA_VISIBLE_DEVICES gives it by UUID.

    The second is what is left when CUDA does not work at all, which is when the GPU's health matters most.
    """
    if uuid:
        return uuid
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if local_rank < len(visible) and visible[local_rank].startswith(("GPU-", "MIG-")):
        return visible[local_rank]
    return ""


def check_health(
    uuid: str, rank: int, host: str, thresholds: str, deadline_s: float, load: Callable[[], None] | None = None
) -> HealthResult:
    """Look at one GPU. `load` keeps it at work for a moment and is called over and over; without one, what only shows
    under load stays unknown. `thresholds` is the file of --health-thresholds. Raises UsageError for a bad one."""
    limits = load_thresholds(thresholds)
    if not uuid:
        return HealthResult([], "no GPU in use")
    answer = ask_nvml([uuid], deadline_s, loaded=load is not None, meanwhile=load)
    findings, detail = grade_answer(answer, uuid, limits, [rank], host)
    return HealthResult(findings, detail)


def cuda_load(index: int) -> Callable[[], None]:
    """Work for a CUDA device: each call a few milliseconds of matrix products and of copies over PCIe."""
    import torch

    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    matrix = torch.randn(_LOAD_SIZE, _LOAD_SIZE, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(matrix)
    here = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, device=device)
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch.cuda.Stream has no annotations

    def work() -> None:
        for _ in range(8):
            torch.mm(matrix, matrix, out=out)
        with torch.cuda.stream(copies):
            there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(device)

    return work
