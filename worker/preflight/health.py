"""The health stage of one rank: compares what NVML reports of its GPU under load with the table of thresholds.

It runs in the rank's child. A separate process reads NVML, so that a driver that hangs costs only the stage's deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...core.codes import Code
from ...core.gpu.health_grades import STAGE, grade_answer, load_thresholds
from ...core.gpu.limits import LOADED_FACTS
from ...core.gpu.nvml_child import GpuReading, ask_nvml
from ...core.preflight import PreflightFinding

_LOAD_SIZE = 4096
_SAMPLING_S = 5.0
"""Time that must remain before the deadline to read a GPU under load."""
_TRANSFER_BYTES = 64 << 20
_STOPS_S = 1.0
"""Time for the load to end. Each call of it takes milliseconds."""


@dataclass(frozen=True)
class HealthResult:
    """The findings, and one line about what was read."""

    findings: list[PreflightFinding]
    detail: str
    load_hangs: bool = False
    """The load did not end, so no other test may use this process."""


GpuLoad = Callable[[], Callable[[], None]]
"""Called once, in a thread: returns a function that keeps a GPU busy for a moment, and that is called repeatedly."""


def check_health(
    uuid: str, rank: int, host: str, thresholds: str, deadline_s: float, load: GpuLoad | None = None
) -> HealthResult:
    """Check one GPU. Without a load, values that need it are unknown. `thresholds` is the file of --health-thresholds.

    Raises UsageError for an invalid file.
    """
    limits = load_thresholds(thresholds)
    if not uuid:
        sentence = f"the health of the GPU of rank {rank} on {host} is unknown: CUDA does not report its UUID"
        return HealthResult(
            [PreflightFinding(STAGE, "unknown", "rank", [rank], [host], sentence, code=Code.HEALTH_UNKNOWN)],
            "not asked",
        )
    end = time.monotonic() + deadline_s
    answer = ask_nvml([uuid], deadline_s)
    reading = answer.readings.get(uuid)
    load_hangs = False
    if load is not None and reading is not None and answer.finished and not answer.trouble:
        load_hangs = not _read_under_load(reading, load, end)
    findings, detail = grade_answer(answer, uuid, limits, [rank], host)
    return HealthResult(findings, detail, load_hangs)


def _read_under_load(reading: GpuReading, load: GpuLoad, end: float) -> bool:
    """Read the GPU's clocks and link under load. Returns whether the load has ended. `end` is monotonic time.

    The load has a thread of its own: CUDA may hang on a faulty GPU, then forever, and NVML must be read nevertheless.
    """
    began, enough, errors = threading.Event(), threading.Event(), []

    def work() -> None:
        try:
            once = load()  # fails here without free memory or with a lost GPU
            while not enough.is_set():
                once()
                began.set()
        except Exception as error:  # a CUDA error, or no free memory, which the allocation stage reports
            errors.append(f"the load failed: {str(error).strip().partition(chr(10))[0]}")
            began.set()

    thread = threading.Thread(target=work, daemon=True, name="gpuwatch-load")
    thread.start()
    seconds = max(0.0, end - time.monotonic() - _SAMPLING_S)
    trouble = "" if began.wait(seconds) else f"the load did not begin within {seconds:.0f} s"
    if not trouble and not errors:
        answer = ask_nvml([reading.device], end - time.monotonic(), loaded=True)
        reading.take(answer.readings.get(reading.device, GpuReading(reading.device)))
        trouble = answer.trouble
    trouble = next(iter(errors), trouble)
    enough.set()
    thread.join(_STOPS_S)
    if trouble:
        reading.forget(LOADED_FACTS, trouble)
    return not thread.is_alive()


def cuda_load(index: int) -> Callable[[], None]:
    """A `GpuLoad` of a CUDA device: a few milliseconds of matrix products and copies over PCIe."""
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
