"""What the preflight and a second run ask of a device: its memory, clock, identity, streams and random numbers.

How the numbers of tensors are read there is device.py's. Another accelerator is one more class here, and one there; the
other files that name a kind are listed in docs/development.md.
"""
# ruff: noqa: D102  # `TestedDevice` and `Accelerator` say what the methods do

from __future__ import annotations

import ctypes
import math
import platform
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from ...core.signal_errors import from_outside
from ...core.text import MemoryAmount, first_line


class TestSizes(NamedTuple):
    """How much of a device the preflight's tests use."""

    quick: MemoryAmount
    quick_most: int
    """In bytes, where nobody has named an amount."""
    full: MemoryAmount
    least_free: float
    """A device with a smaller share of free memory gets a warning: the training may not fit."""
    matmul: int
    """Rows of the square matrices."""
    matmul_dtype: torch.dtype
    repeats: int
    most_s: float
    """No further repetition begins after this many seconds."""
    all_reduce: int
    """The largest number of bytes."""


GeneratorState = tuple[int, int]
"""(seed, offset) of a device's generator of random numbers"""


class TestedDevice(Protocol):
    """What the preflight tests: a kind of GPU, or the CPU. `device` is one of this kind, with its index."""

    reporter: str
    """What knows how much memory is free."""
    sizes: TestSizes
    if_out_of_memory: str
    """What to do then, as one sentence."""
    if_memory_is_bad: str

    def use(self, device: torch.device) -> None:
        """Make it the current device of this thread."""

    def release_cache(self) -> None:
        """Give back the memory that torch keeps without a tensor in it."""

    def memory(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes."""

    def prepare_matmul(self) -> None:
        """Make the results of the current device the same on every one with the same `kernels`."""

    def typical(self, times: Sequence[float]) -> float:
        """Of the times of equal work, the one to compare."""

    def kernels(self, device: torch.device) -> str:
        """All that selects a kernel, and so the bits of its result: `NVIDIA H100 80GB HBM3, 132 SMs, torch 2.13.0`."""

    def timed(self, call: Callable[[], object], deadline: float | None, late: Callable[[], Exception]) -> float:
        """Seconds of the work that `call` starts on the current device. Waits for it, or raises `late()`."""


class Accelerator(TestedDevice, Protocol):
    """One kind of GPU. Calls return before their work on it is done."""

    type: str
    """The `type` of its torch.device."""

    def is_built(self) -> bool:
        """Whether this torch can use it. Asks no driver."""

    def is_in_use(self) -> bool:
        """Whether this process has used it. Does not initialise it."""

    def why_none(self) -> str:
        """Why no such device can be used: the first line of the error; "" if one can. Initialises it, and may hang."""

    def count(self) -> int:
        """How many this process sees."""

    def name(self, index: int) -> str:
        """The product. Raises torch's error if it cannot be read."""

    def pci_bus(self, index: int) -> str:
        """`0000:3b:00.0`, as the kernel and lspci write it."""

    def uuid(self, index: int) -> str:
        """As the driver's own tools write it; "" if it has none."""

    def versions(self) -> dict[str, str]:
        """Versions of what torch uses there, by name. Raises what torch raises."""

    def toolkit(self) -> dict[str, str]:
        """Versions that this torch is built with, by name; "" if unknown. Asks no driver."""

    def current(self) -> int:
        """The index of the current device."""

    def load(self, index: int) -> Callable[[], None]:
        """A function that keeps a device busy for some milliseconds. Raises torch's error where it cannot be."""

    def contexts(self) -> list[Callable[[], AbstractContextManager[Any]]]:
        """What makes the current device and stream current in another thread."""

    def random_state(self) -> GeneratorState | None:
        """That of the current device; None where it cannot be read without waiting."""

    def set_random_state(self, state: GeneratorState) -> None:
        """Let the generator of the current device go on from there."""


_POLL_S = 0.0002
"""Time between two queries of an event. The device measures the duration, so a late query costs no accuracy."""
_LOAD_SIZE = 4096
_TRANSFER_BYTES = 64 << 20


class CudaAccelerator:
    """CUDA, and ROCm by the same names. torch.cuda has no annotations in many places."""

    type, reporter = "cuda", "driver"
    sizes = TestSizes(
        quick=MemoryAmount(share=0.1),
        quick_most=1 << 30,
        full=MemoryAmount(share=0.8),
        least_free=0.1,
        matmul=8192,  # 1.1 TFLOP: about 2 ms on an H100, enough to use all its units
        matmul_dtype=torch.bfloat16,
        repeats=20,
        most_s=math.inf,
        all_reduce=256 << 20,
    )
    if_out_of_memory = "Look for other processes on this GPU (`nvidia-smi`), or ask for less with --alloc."
    if_memory_is_bad = "Take this GPU out of service and run the vendor's memory test on it."

    def is_built(self) -> bool:
        return bool(torch.version.cuda or torch.version.hip)

    def is_in_use(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]

    def why_none(self) -> str:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:  # its class depends on the cause and the version
            if from_outside(error):
                raise
            return first_line(error)
        return "" if torch.cuda.device_count() else "no GPU is visible"

    def count(self) -> int:
        return torch.cuda.device_count()

    def name(self, index: int) -> str:
        return torch.cuda.get_device_properties(index).name

    def pci_bus(self, index: int) -> str:
        """torch has it from 2.7 on."""
        properties = torch.cuda.get_device_properties(index)
        domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def uuid(self, index: int) -> str:
        """`GPU-...` as NVML writes it; `MIG-...` for an instance, of which torch may give the whole GPU's."""
        properties = torch.cuda.get_device_properties(index)
        if " MIG " in properties.name:
            return f"MIG-{driver_uuid(index)}"
        return f"GPU-{properties.uuid}"

    def versions(self) -> dict[str, str]:
        return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]

    def toolkit(self) -> dict[str, str]:
        return {"cuda": torch.version.cuda or ""}

    def use(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def current(self) -> int:
        return torch.cuda.current_device()

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory(self, device: torch.device) -> tuple[int, int]:
        torch.cuda.set_device(device)  # else another device gets a context
        return torch.cuda.mem_get_info(device)

    def prepare_matmul(self) -> None:
        pass

    def typical(self, times: Sequence[float]) -> float:
        return statistics.median(times)  # it shows throttling

    def kernels(self, device: torch.device) -> str:
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}"

    def timed(self, call: Callable[[], object], deadline: float | None, late: Callable[[], Exception]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        if deadline is None:
            ended.synchronize()
        while not ended.query():  # type: ignore[no-untyped-call]
            if deadline is not None and time.monotonic() > deadline:
                raise late()
            time.sleep(_POLL_S)
        return float(began.elapsed_time(ended)) / 1e3

    def load(self, index: int) -> Callable[[], None]:
        """Matrix products, and copies over PCIe."""
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        matrix = torch.randn(_LOAD_SIZE, _LOAD_SIZE, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(matrix)
        here = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, device=device)
        copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def work() -> None:
            for _ in range(8):
                torch.mm(matrix, matrix, out=out)
            with torch.cuda.stream(copies):
                there.copy_(here, non_blocking=True)
            torch.cuda.synchronize(device)

        return work

    def contexts(self) -> list[Callable[[], AbstractContextManager[Any]]]:
        return [
            partial(torch.cuda.device, torch.cuda.current_device()),
            partial(torch.cuda.stream, torch.cuda.current_stream()),
        ]

    def random_state(self) -> GeneratorState | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return generator.initial_seed(), generator.get_offset()

    def set_random_state(self, state: GeneratorState) -> None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.manual_seed(state[0])
        generator.set_offset(state[1])


def driver_uuid(index: int) -> str:
    """The UUID from the driver: cuDeviceGetUuid_v2 (CUDA 11.4) is documented to return that of a MIG instance.

    Raises OSError.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    found = (ctypes.c_ubyte * 16)()
    status = driver.cuDeviceGetUuid_v2(ctypes.byref(found), ctypes.c_int(index))
    if status:
        raise OSError(f"cuDeviceGetUuid_v2 returned {status}")
    return str(uuid.UUID(bytes=bytes(found)))


class HostProcessor:
    """The CPU, for ranks without a GPU."""

    reporter = "system"
    sizes = TestSizes(
        quick=MemoryAmount(size=64 << 20),
        quick_most=64 << 20,
        full=MemoryAmount(size=256 << 20),
        least_free=0.0,
        matmul=768,
        matmul_dtype=torch.float32,  # a CPU without bf16 instructions takes hundreds of times as long for bf16
        repeats=8,
        most_s=0.2,
        all_reduce=16 << 20,
    )
    if_out_of_memory = (
        "Look at the limits of this rank (`ulimit -v`, the container's memory), or ask for less with --alloc."
    )
    if_memory_is_bad = "Take this host out of service and run a memory test on it."

    def use(self, device: torch.device) -> None:
        pass

    def release_cache(self) -> None:
        pass

    def memory(self, device: torch.device) -> tuple[int, int]:
        found = psutil.virtual_memory()
        return found.available, found.total

    def prepare_matmul(self) -> None:
        torch.set_num_threads(1)

    def typical(self, times: Sequence[float]) -> float:
        return min(times)  # other work only makes a time longer

    def kernels(self, device: torch.device) -> str:
        return f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"

    def timed(self, call: Callable[[], object], deadline: float | None, late: Callable[[], Exception]) -> float:
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s


def _cpu_model() -> str:
    """Model and stepping of the first core, from the Linux kernel. On other systems, what Python knows."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")
    try:
        block = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError as error:
        if from_outside(error):
            raise
        return f"cpu {platform.machine()} {platform.processor()}".strip()
    lines = dict(line.replace("\t", "").split(":", 1) for line in block.splitlines() if ":" in line)
    found = [lines[name].strip() for name in wanted if name in lines]
    return "cpu " + " ".join(found)


_HOST = HostProcessor()
_GPUS: tuple[Accelerator, ...] = (CudaAccelerator(),)


def tested_device(device: torch.device) -> TestedDevice:
    """What knows a device of this kind; the CPU's for one that nothing here knows."""
    return gpu_of(device) or _HOST


def gpu_of(device: torch.device) -> Accelerator | None:
    """The kind of GPU of a device; None if it is the CPU, or one that nothing here knows."""
    return next((each for each in _GPUS if each.type == device.type), None)


def built_gpu() -> Accelerator | None:
    """The kind of GPU that this torch is built for; None: it has the CPU alone. Asks no driver."""
    return next(iter(_built()), None)


@cache
def _built() -> tuple[Accelerator, ...]:
    return tuple(each for each in _GPUS if each.is_built())


def gpu_in_use() -> Accelerator | None:
    """The kind of GPU that this process has used; None if none. Does not initialise one."""
    for each in _built():  # in every step that is skipped
        if each.is_in_use():
            return each
    return None
