"""The tests of one rank's device: its memory, and a seeded matmul. Run them in a separate process.

The memory test allocates a share of the free memory, writes every bit as 0 and as 1, and reads it back. On the CPU the
system may promise more memory than it has, so only written memory counts. A process that exceeds the container's limit
is killed. The coordinator then sees a child that died in this stage.

The exact bits of the matmul and its time are compared with those of the other ranks. Equal bits are expected only where
the same kernels run. The device type names everything that selects a kernel. On the CPU the number of threads also
does, so `compute` sets it to one.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from ...core.text import MemoryAmount
from .inventory import device_uuid
from .probe_child import ProbeFailure
from .steps import ComputeResult

CPU_QUICK = MemoryAmount(size=64 << 20)
CPU_FULL = MemoryAmount(size=256 << 20)
CUDA_QUICK = MemoryAmount(share=0.1)
CUDA_QUICK_MOST = 1 << 30
CUDA_FULL = MemoryAmount(share=0.8)
CUDA_LEAST_FREE = 0.1
"""A GPU with a smaller share of free memory gets a warning: the training may not fit."""

_CHUNK = 64 << 20
"""Bytes written and read at once. The pattern takes the same amount of memory besides the block."""
_GRAIN = 1 << 20
_WORD = 8


@dataclass(frozen=True)
class AllocationResult:
    """What was done, in words. If little memory was free, also how little, and what to do about it."""

    detail: str
    scarce: str = ""
    next: str = ""


def allocate(
    device: torch.device, amount: MemoryAmount | None, *, quick: bool = False, sharers: int = 1
) -> AllocationResult:
    """Test `amount` of memory; None: the mode's default. Raises ProbeFailure.

    `sharers` is the number of ranks that test the same memory at once: on the CPU those of this host, on CUDA those
    that use the same GPU.
    """
    scarce = next_ = ""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()  # memory that an earlier test left in torch's cache is free, too
        free, total = torch.cuda.mem_get_info(device)
        if free < total * CUDA_LEAST_FREE:
            scarce = f"only {_mib(free)} of {_mib(total)} free on {device}: others hold the rest"
            next_ = (
                "If the training runs out of memory, end the processes that `nvidia-smi` shows on this GPU and that "
                "are not yours."
            )
        wanted = (amount or (CUDA_QUICK if quick else CUDA_FULL)).of(free // sharers)
        if amount is None and quick:
            wanted = min(wanted, CUDA_QUICK_MOST)
    else:
        free = psutil.virtual_memory().available
        wanted = (amount or (CPU_QUICK if quick else CPU_FULL)).of(free // sharers)

    count = max(1, wanted // _WORD)
    try:
        block = torch.empty(count, dtype=torch.int64, device=device)
        wrong = count_wrong_words(block)
    except RuntimeError as error:  # OutOfMemoryError is a subclass
        if not is_out_of_memory(error):
            raise
        had = largest_block(lambda size: _can_have(size, device), min(free, wanted))
        raise ProbeFailure(
            f"{_mib(wanted)} could not be allocated on {device}: the largest available block was {_mib(had)}, "
            f"and the {'driver' if device.type == 'cuda' else 'system'} reports {_mib(free)} free",
            next="Look for other processes on this GPU (`nvidia-smi`), or ask for less with --alloc."
            if device.type == "cuda"
            else "Look at the limits of this rank (`ulimit -v`, the container's memory), or ask for less with --alloc.",
        ) from error
    if wrong:
        raise ProbeFailure(
            f"{wrong} of {count} words read back from {device} are not what was written",
            next="Take this GPU out of service and run the vendor's memory test on it."
            if device.type == "cuda"
            else "Take this host out of service and run a memory test on it.",
        )
    del block
    detail = f"{_mib(wanted)} written and read back on {device}"
    if not quick:
        most = free // sharers if device.type == "cuda" else free
        had = max(wanted, largest_block(lambda size: _can_have(size, device), most))
        detail += f"; largest block {_mib(had)} of {_mib(free)} free"
    return AllocationResult(detail, scarce, next_)


def count_wrong_words(block: torch.Tensor) -> int:
    """Fill a block of int64 with a pattern and read it back, then with the pattern's complement."""
    step = min(_CHUNK // _WORD, block.numel())
    # the factor makes neighbouring words differ in all bits; the chunk's number makes equal chunks differ
    pattern = torch.arange(step, dtype=torch.int64, device=block.device).mul_(-7046029254386353131)
    chunks = torch.split(block, step)
    wrong = 0
    for _ in range(2):
        for number, chunk in enumerate(chunks):
            torch.bitwise_xor(pattern[: chunk.numel()], number, out=chunk)
        for number, chunk in enumerate(chunks):
            wrong += int(torch.count_nonzero(chunk.bitwise_xor_(number).sub_(pattern[: chunk.numel()])))
        pattern.bitwise_not_()
    return wrong


def largest_block(can_have: Callable[[int], bool], most: int, grain: int = _GRAIN) -> int:
    """The largest size up to `most` that can be allocated, in multiples of `grain`, by bisection.

    >>> largest_block(lambda size: size <= 700, 1000, grain=1)
    700
    """
    if can_have(most):
        return most
    had, refused = 0, most
    while refused - had > grain:
        middle = (had + refused) // 2
        if can_have(middle):
            had = middle
        else:
            refused = middle
    return had


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate. On the CPU only the message says so."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _can_have(size: int, device: torch.device) -> bool:
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # else the last block is in the way of the next, larger one
    return True


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB" if size < 10 << 30 else f"{size / (1 << 30):.1f} GiB"


# The matmul.

CUDA_SIZE = 8192
"""1.1 TFLOP: about 2 ms on an H100, enough to use all its units."""
CPU_SIZE = 768
CUDA_REPEATS = 20
CPU_REPEATS = 8
_CPU_MOST_S = 0.2
_SEED = 26480
_POLL_S = 0.0002
"""Time between two queries of an event. The device measures the duration, so a late query costs no accuracy."""


def timed(
    device: torch.device,
    call: Callable[[], object],
    deadline: float | None = None,
    late: Callable[[], Exception] = TimeoutError,
) -> float:
    """Seconds of the work that `call` starts, by the device's own clock if it has one.

    Waits for the work, or raises `late()` at the monotonic deadline.
    """
    if device.type != "cuda":
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s
    # torch has no annotations there
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


def compute(device: torch.device) -> ComputeResult:
    """Multiply several times. Raises ProbeFailure if the results of this device differ."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        size, dtype = CUDA_SIZE, torch.bfloat16
    else:  # a CPU without bf16 instructions takes hundreds of times as long for bf16
        torch.set_num_threads(1)
        size, dtype = CPU_SIZE, torch.float32
    first, second = (seeded(size, device, seed).to(dtype) for seed in (_SEED, _SEED + 1))
    product, again = torch.empty_like(first), torch.empty_like(first)
    torch.matmul(first, second, out=product)  # also the warm-up, in which the library selects its kernel
    times: list[float] = []
    for number in range(CUDA_REPEATS if device.type == "cuda" else CPU_REPEATS):
        times.append(timed(device, partial(torch.matmul, first, second, out=again)) * 1e3)
        if _differing(again, product):
            raise ProbeFailure(
                f"the same matmul on {device} gave different bits when it was repeated ({_differing(again, product)} "
                f"of {product.numel()} numbers differ, repetition {number + 1})",
                next="Take this device out of service: it sometimes computes wrong results.",
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


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    bits = torch.int16 if one.dtype is torch.bfloat16 else torch.int32
    return int(torch.count_nonzero(one.view(bits) != other.view(bits)))


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


# The load under which the health of a GPU is read (inventory.py).

_LOAD_SIZE = 4096
_TRANSFER_BYTES = 64 << 20


def cuda_load(index: int) -> Callable[[], None]:
    """A `GpuLoad` of a CUDA device: a few milliseconds of matrix products and copies over PCIe."""
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
