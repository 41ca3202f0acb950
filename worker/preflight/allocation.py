"""The memory test: allocate a share of the free memory, write every bit as 0 and as 1, and read it back.

On the CPU the system may promise more memory than it has, so only written memory counts. A process that exceeds the
container's limit is killed. The coordinator then sees a child that died in this stage.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import psutil
import torch

from ...core.text import MemoryAmount
from .rank_child import ProbeFailure

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


class AllocationResult(msgspec.Struct, frozen=True):
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
            next_ = "If the training runs out of memory, end what `nvidia-smi` shows on this GPU and is not yours."
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
            f"{_mib(wanted)} could not be allocated on {device}: the largest block to be had was {_mib(had)}, "
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
