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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ...core.text import MemoryAmount
from ..device.accelerator import gpu_of, tested_device
from .probe_child import ProbeFailure
from .steps import ComputeResult

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
    tested = tested_device(device)
    sizes = tested.sizes
    tested.use(device)
    tested.release_cache()  # memory that an earlier test left in torch's cache is free, too
    free, total = tested.memory(device)
    if free < total * sizes.least_free:
        scarce = f"only {_mib(free)} of {_mib(total)} free on {device}: others hold the rest"
        next_ = (
            "If the training runs out of memory, end the processes that `nvidia-smi` shows on this GPU and that are "
            "not yours."
        )
    wanted = (amount or (sizes.quick if quick else sizes.full)).of(free // sharers)
    if amount is None and quick:
        wanted = min(wanted, sizes.quick_most)

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
            f"and the {tested.reporter} reports {_mib(free)} free",
            next=tested.if_out_of_memory,
        ) from error
    if wrong:
        raise ProbeFailure(
            f"{wrong} of {count} words read back from {device} are not what was written",
            next=tested.if_memory_is_bad,
        )
    del block
    detail = f"{_mib(wanted)} written and read back on {device}"
    if not quick:
        most = free // sharers if gpu_of(device) is not None else free
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
        tested_device(device).release_cache()  # else the last block is in the way of the next, larger one
    return True


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB" if size < 10 << 30 else f"{size / (1 << 30):.1f} GiB"


# The matmul.

_SEED = 26480


def compute(device: torch.device) -> ComputeResult:
    """Multiply several times. Raises ProbeFailure if the results of this device differ."""
    tested = tested_device(device)
    sizes = tested.sizes
    tested.use(device)
    tested.prepare_matmul()
    first, second = (seeded(sizes.matmul, device, seed).to(sizes.matmul_dtype) for seed in (_SEED, _SEED + 1))
    product, again = torch.empty_like(first), torch.empty_like(first)
    torch.matmul(first, second, out=product)  # also the warm-up, in which the library selects its kernel
    times: list[float] = []
    for number in range(sizes.repeats):
        times.append(tested.timed(partial(torch.matmul, first, second, out=again), None, TimeoutError) * 1e3)
        if _differing(again, product):
            raise ProbeFailure(
                f"the same matmul on {device} gave different bits when it was repeated ({_differing(again, product)} "
                f"of {product.numel()} numbers differ, repetition {number + 1})",
                next="Take this device out of service: it sometimes computes wrong results.",
            )
        if sum(times) > sizes.most_s * 1e3:
            break
    gpu = gpu_of(device)
    uuid = gpu.uuid(gpu.current()) if gpu is not None else ""
    return ComputeResult(digest_of(product), round(tested.typical(times), 4), tested.kernels(device), uuid)


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


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    bits = torch.int16 if one.dtype is torch.bfloat16 else torch.int32
    return int(torch.count_nonzero(one.view(bits) != other.view(bits)))
