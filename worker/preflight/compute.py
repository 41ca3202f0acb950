"""One seeded matmul: its exact bits and its time, to be compared with those of the other ranks.

Equal bits are expected only where the same kernels run. The device type names everything that selects a kernel. On the
CPU the number of threads also does, so this module sets it to one. Run it in a separate process.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .inventory import device_uuid
from .rank_child import ProbeFailure
from .steps import ComputeResult

# Measures durations by the GPU's own clock.

_POLL_S = 0.0002
"""Time between two queries of an event. The device measures the duration, so a late query costs no accuracy."""


class DeviceTimer:
    """A timer in the current stream. It starts when it is made."""

    def __init__(self) -> None:
        self._began = self._event()

    def seconds(self, deadline: float | None = None, late: Callable[[], Exception] = TimeoutError) -> float:
        """The duration of the work started since then. Waits for it, or raises `late()` at the monotonic deadline."""
        ended = self._event()
        if deadline is None:
            ended.synchronize()
        while not ended.query():  # type: ignore[no-untyped-call]  # torch has no annotations there
            if deadline is not None and time.monotonic() > deadline:
                raise late()
            time.sleep(_POLL_S)
        return float(self._began.elapsed_time(ended)) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotations there
        event.record()
        return event


CUDA_SIZE = 8192
"""1.1 TFLOP: about 2 ms on an H100, enough to use all its units."""
CPU_SIZE = 768
CUDA_REPEATS = 20
CPU_REPEATS = 8
_CPU_MOST_S = 0.2
_SEED = 26480


def compute(device: torch.device) -> ComputeResult:
    """Multiply several times. Raises ProbeFailure if the results of this device differ."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        size = CUDA_SIZE
    else:
        torch.set_num_threads(1)
        size = CPU_SIZE
    first, second = seeded(size, device, _SEED), seeded(size, device, _SEED + 1)
    product, again = torch.empty_like(first), torch.empty_like(first)
    _timed(first, second, product)  # also the warm-up, in which the library selects its kernel
    times: list[float] = []
    for number in range(CUDA_REPEATS if device.type == "cuda" else CPU_REPEATS):
        times.append(_timed(first, second, again))
        if not torch.equal(again.view(torch.int16), product.view(torch.int16)):
            raise ProbeFailure(
                f"the same matmul on {device} gave other bits when it was repeated ({_differing(again, product)} of "
                f"{product.numel()} numbers differ, repetition {number + 1})",
                next="Take this device out of service: it computes wrong now and then.",
            )
        if device.type == "cpu" and sum(times) > _CPU_MOST_S * 1e3:
            break
    # On the CPU other work only makes a time longer, so take the shortest. On a GPU the median shows throttling.
    taken = statistics.median(times) if device.type == "cuda" else min(times)
    uuid = device_uuid(torch.cuda.current_device()) if device.type == "cuda" else ""
    return ComputeResult(digest_of(product), round(taken, 4), device_type(device), uuid)


def seeded(size: int, device: torch.device, seed: int) -> torch.Tensor:
    """A square of bf16 in [-1, 1) with the same bits on every device.

    The numbers are hashed integers: those of torch's generators differ between types of CPU.
    """
    rows = torch.arange(size, dtype=torch.int32, device=device).unsqueeze(1)
    columns = torch.arange(size, dtype=torch.int32, device=device).unsqueeze(0)
    mixed = rows * 7919 + columns * 104729 + seed  # no step exceeds 31 bits
    for _ in range(2):
        mixed.bitwise_xor_(mixed >> 11)
        mixed = mixed.bitwise_and_(0xFFFF).mul_(29789)
    return ((mixed >> 7) & 0xFF).sub_(128).to(torch.bfloat16).div_(128)


def digest_of(tensor: torch.Tensor) -> str:
    """The digest of the exact bits. The host computes it, since the device may be wrong."""
    on_host = tensor.contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(on_host.data, digest_size=8).hexdigest()


def device_type(device: torch.device) -> str:
    """Everything that selects the kernel, and so the bits: `NVIDIA H100 80GB HBM3, 132 SMs, torch 2.13.0+cu130`."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        units = f"{properties.multi_processor_count} SMs"
        return f"{properties.name}, {units}, torch {torch.__version__}"
    return f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _timed(first: torch.Tensor, second: torch.Tensor, product: torch.Tensor) -> float:
    """The duration of one matmul in milliseconds."""
    if first.is_cuda:
        timer = DeviceTimer()
        torch.matmul(first, second, out=product)
        return timer.seconds() * 1e3
    began_s = time.perf_counter()
    torch.matmul(first, second, out=product)
    return (time.perf_counter() - began_s) * 1e3


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    return int(torch.count_nonzero(one.view(torch.int16) != other.view(torch.int16)))


def _cpu_model() -> str:
    """Model and stepping of the first core, from the Linux kernel. On other systems, what Python knows."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")
    try:
        block = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return f"cpu {platform.machine()} {platform.processor()}".strip()
    known = dict(line.replace("\t", "").split(":", 1) for line in block.splitlines() if ":" in line)
    found = [known[name].strip() for name in wanted if name in known]
    return "cpu " + " ".join(found)
