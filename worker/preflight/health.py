"""The health stage of one rank: compares what NVML reports of its GPU under load with the table of thresholds.

It runs in the rank's child. A separate process reads NVML, so that a driver that hangs costs only the stage's deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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


def check_health(
    uuid: str, rank: int, host: str, thresholds: str, deadline_s: float, load: Callable[[], None] | None = None
) -> HealthResult:
    """Check one GPU. `load` keeps it busy for a moment and is called repeatedly in a thread; without it, values that
    need load are unknown. `thresholds` is the file of --health-thresholds. Raises UsageError for an invalid file."""
    limits = load_thresholds(thresholds)
    if not uuid:
        sentence = f"the health of the GPU of rank {rank} on {host} is unknown: CUDA does not report its UUID"
        return HealthResult([PreflightFinding(STAGE, "unknown", "rank", [rank], [host], sentence)], "not asked")
    end = time.monotonic() + deadline_s
    answer = ask_nvml([uuid], deadline_s)
    reading = answer.readings.get(uuid)
    load_hangs = False
    if load is not None and reading is not None and answer.finished and not answer.trouble:
        load_hangs = not _read_under_load(reading, load, end)
    findings, detail = grade_answer(answer, uuid, limits, [rank], host)
    return HealthResult(findings, detail, load_hangs)


def _read_under_load(reading: GpuReading, load: Callable[[], None], end: float) -> bool:
    """Read the GPU's clocks and link under load. Returns whether the load has ended. `end` is monotonic time."""
    at_work = _AtWork(load)
    trouble = at_work.wait(end - time.monotonic() - _SAMPLING_S)
    if not trouble:
        answer = ask_nvml([reading.device], end - time.monotonic(), loaded=True)
        reading.take(answer.readings.get(reading.device, GpuReading(reading.device)))
        trouble = at_work.error or answer.trouble
    ended = at_work.stop()
    if trouble:
        reading.forget(LOADED_FACTS, trouble)
    return ended


class _AtWork:
    """A load in a separate thread. CUDA may hang on a faulty GPU, and NVML must be read nevertheless."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error = ""
        self._work = work
        self._began, self._enough = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpuwatch-load")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._enough.is_set():
                self._work()
                self._began.set()
        except Exception as error:  # a CUDA error, or no free memory, which the allocation stage reports
            self.error = f"the load failed: {str(error).strip().partition(chr(10))[0]}"
            self._began.set()

    def wait(self, seconds: float) -> str:
        """Wait until the load runs. Returns "", or why it does not run."""
        if not self._began.wait(max(0.0, seconds)):
            return f"the load did not begin within {max(0.0, seconds):.0f} s"
        return self.error

    def stop(self) -> bool:
        """Stop the load. Returns whether it has ended: a thread that waits for a faulty GPU may wait forever."""
        self._enough.set()
        self._thread.join(_STOPS_S)
        return not self._thread.is_alive()


def cuda_load(index: int) -> Callable[[], None]:
    """A load for a CUDA device. Each call does a few milliseconds of matrix products and copies over PCIe."""
    work: Callable[[], None] | None = None

    def do() -> None:
        nonlocal work
        if work is None:  # fails here without free memory or with a lost GPU
            work = _prepare(index)
        work()

    return do


def _prepare(index: int) -> Callable[[], None]:
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
