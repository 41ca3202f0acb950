"""How one GPU does at a moment: a few cheap questions to NVML, asked every few seconds. A child process asks them.

Telemetry shows these figures and judges no GPU by them (grade.py does that). A question that this GPU, driver or
nvidia-ml-py has no answer to is asked once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .facts import SampleLine
from .nvml import NotKnown, ask, field_value
from .reading import CLOCK_REASONS, clock_reasons

_SM_CLOCK = 1
"""NVML_CLOCK_SM"""
_ALL_LINKS = 0xFFFF_FFFF
_MOST_S = 60.0
"""A pause that is longer says nothing of the clocks in it."""

Question = Callable[[Any], dict[str, float]]


def _use(gpu: Any) -> dict[str, float]:
    return {"gpu_use": ask("nvmlDeviceGetUtilizationRates", gpu).gpu / 100}


def _memory(gpu: Any) -> dict[str, float]:
    memory = ask("nvmlDeviceGetMemoryInfo", gpu)
    return {"gpu_memory_used": memory.used, "gpu_memory_total": memory.total}


def _clock(gpu: Any) -> dict[str, float]:
    return {"sm_clock": ask("nvmlDeviceGetClockInfo", gpu, _SM_CLOCK)}


def _highest_clock(gpu: Any) -> dict[str, float]:
    return {"sm_clock_max": ask("nvmlDeviceGetMaxClockInfo", gpu, _SM_CLOCK)}


def _power(gpu: Any) -> dict[str, float]:
    return {"power": ask("nvmlDeviceGetPowerUsage", gpu) / 1000}


def _temperature(gpu: Any) -> dict[str, float]:
    return {"temperature": ask("nvmlDeviceGetTemperature", gpu, 0)}


def _corrected(gpu: Any) -> dict[str, float]:
    return {"ecc_corrected": ask("nvmlDeviceGetTotalEccErrors", gpu, 0, 0)}


def _uncorrected(gpu: Any) -> dict[str, float]:
    return {"ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", gpu, 1, 0)}


def _replays(gpu: Any) -> dict[str, float]:
    return {"pcie_replays": ask("nvmlDeviceGetPcieReplayCounter", gpu)}


def _link(gpu: Any) -> dict[str, float]:
    return {
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", gpu),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", gpu),
    }


def _pcie(gpu: Any) -> dict[str, float]:
    """nvmlDeviceGetPcieThroughput would wait for 20 ms; these count, on newer GPUs."""
    return {
        "pcie_received": field_value(gpu, "NVML_FI_DEV_PCIE_COUNT_RX_BYTES"),
        "pcie_sent": field_value(gpu, "NVML_FI_DEV_PCIE_COUNT_TX_BYTES"),
    }


def _nvlink(gpu: Any) -> dict[str, float]:
    """In KiB, of all links together."""
    return {
        "nvlink_received": 1024 * field_value(gpu, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS),
        "nvlink_sent": 1024 * field_value(gpu, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS),
    }


_QUESTIONS: tuple[Question, ...] = (
    _use,
    _memory,
    _clock,
    _highest_clock,
    _power,
    _temperature,
    _corrected,
    _uncorrected,
    _replays,
    _link,
    _pcie,
    _nvlink,
)


class GpuSampler:
    """Of one whole GPU."""

    def __init__(self, uuid: str, gpu: Any) -> None:
        self._uuid = uuid
        self._gpu = gpu
        self._questions = list(_QUESTIONS)
        self._held_s = dict.fromkeys(CLOCK_REASONS, 0.0)
        """Why its clocks are held down -> seconds of that: at a sample and so, it is taken, since the one before."""
        self._last: float | None = None

    def sample(self, now: float, *, last: bool) -> SampleLine:
        """`now` is monotonic time in seconds."""
        values: dict[str, float] = {}
        why = ""
        for question in list(self._questions):
            try:
                values.update(question(self._gpu))
            except NotKnown as error:
                why = str(error)
                if error.is_for_good:
                    self._questions.remove(question)
            except (AttributeError, IndexError, TypeError, ValueError) as error:  # an nvidia-ml-py of another shape
                why = f"{type(error).__name__}: {error}"
                self._questions.remove(question)
        values.update(self._reasons(now))
        return SampleLine(self._uuid, values, "" if values else why, last)

    def _reasons(self, now: float) -> dict[str, float]:
        try:
            reasons = clock_reasons(self._gpu)
        except NotKnown:
            return {}
        passed = min(now - self._last, _MOST_S) if self._last is not None else 0.0
        self._last = now
        for name, bit in CLOCK_REASONS.items():
            self._held_s[name] += passed if reasons & bit else 0.0
        return dict(self._held_s)
