"""What watching costs a training step: against nobody, and against transformers' class."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from .lines import Row, first_line, is_rehearsed, passed
from .model import ALL, FORWARD, PEER, PLAIN, DType, Task, peer, synchronize, watched

EAGER_MOST, COMPILED_MOST = 1.05, 1.02
"""Times the plain step, where the device has work enough to hide the host's. A small model is measured by the peer."""
_DTYPES: tuple[DType, ...] = ("bf16", "fp16")
_ROUNDS = 7
_STEPS = {"tiny": 4, "small": 20, "large": 4, "large, 4 layers": 5, "GPT-2": 5, "no size": 20}
"""One block's."""


def eager(device: torch.device) -> Iterator[Row]:
    """Step ratios, each against the plain step of its own round."""
    sizes = ("small", "large") if device.type == "cuda" else ("tiny",)
    for size in sizes:
        for dtype in _DTYPES:
            try:
                yield from _eager(size, dtype, device)
            except torch.OutOfMemoryError as error:
                yield Row(f"step, eager, {dtype}, {size}", "skipped", note=first_line(error))
            except Exception as error:  # the others are measured all the same
                yield Row(f"step, eager, {dtype}, {size}", "fail", note=first_line(error))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _eager(size: str, dtype: DType, device: torch.device) -> Iterator[Row]:
    task = Task(size, device, dtype)
    tasks = {PLAIN: task, FORWARD: task, ALL: task}
    with_peer = Task(size, device, dtype)
    if peer(with_peer.net):
        tasks[PEER] = with_peer
    else:
        del with_peer
    steps = _STEPS[size]
    found: dict[str, list[float]] = {how: [] for how in tasks}
    order = random.Random(0)
    for number in range(_ROUNDS + 1):
        for how in order.sample(list(tasks), len(tasks)):
            ms = _block(tasks[how], PLAIN if how == PEER else how, steps, device)
            if number:
                found[how].append(ms)
    ratios = {how: statistics.median(a / b for a, b in zip(ms, found[PLAIN], strict=True)) for how, ms in found.items()}
    plain_ms = statistics.median(found[PLAIN])
    for how in (FORWARD, ALL):
        good, target = _judge(ratios, how, size)
        what = f"step, eager, {dtype}, {size}, {how}"
        verdict = "told" if good is None else passed(good)
        yield Row(what, verdict, f"{ratios[how]:.3f}", target, f"plain {plain_ms:.2f} ms")
    if PEER in ratios:
        yield Row(f"step, eager, {dtype}, {size}, {PEER}", "told", f"{ratios[PEER]:.3f}")


_EVERY_10 = "--every 10"
_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: (PLAIN, {}),
    FORWARD: (FORWARD, {}),
    ALL: (ALL, {}),
    _EVERY_10: (ALL, {"every": 10}),
}
"""Name -> what is watched, and the other options of `gpuwatch.watch`."""


def cost(device: torch.device) -> Iterator[Row]:
    """GPT-2's sizes (124M parameters without its vocabulary's, bf16, batch 8 x 1024), and its layers without a size.

    One process, by turns: each block of steps is compared with the plain one of its own round.
    """
    is_small = device.type != "cuda" or is_rehearsed()
    for size in ("tiny",) if is_small else ("no size", "GPT-2"):
        tasks = {how: Task(size, device, "bf16") for how in (PLAIN, PEER)}
        ways = [*_WAYS, *([PEER] if peer(tasks[PEER].net) else [])]
        found: dict[str, list[float]] = {how: [] for how in ways}
        order = random.Random(0)
        for number in range(3 if is_small else _ROUNDS):
            for how in order.sample(ways, len(ways)):
                what, options = _WAYS.get(how, (PLAIN, {}))
                ms = _block(tasks[PEER if how == PEER else PLAIN], what, 2 * _STEPS[size], device, **options)
                if number:  # the first round compiles and allocates
                    found[how].append(ms)
        plain = found[PLAIN]
        calls = sum(1 for _ in tasks[PLAIN].net.modules())
        for how in ways[1:]:
            ratio = statistics.median(a / b for a, b in zip(found[how], plain, strict=True))
            added_us = statistics.median(a - b for a, b in zip(found[how], plain, strict=True)) * 1e3
            note = f"plain {statistics.median(plain):.2f} ms; {added_us:.0f} us more, {added_us / calls:.1f} a module"
            yield Row(f"step, bf16, {size}, {how}", "told", f"{ratio:.3f}", "", note)


def _judge(ratios: dict[str, float], how: str, size: str) -> tuple[bool | None, str]:
    if size == "tiny":  # on a late device torch's operations read each tensor, and take the time of many modules
        return None, ""
    if size == "large":
        return ratios[how] <= EAGER_MOST, f"at most {EAGER_MOST}"
    if PEER in ratios and how == FORWARD:  # which is what the peer looks at
        return ratios[how] < ratios[PEER], f"below {PEER}"
    return None, ""


def _block(task: Task, how: str, steps: int, device: torch.device, **options: Any) -> float:
    """Milliseconds per step. The host runs ahead within a block and waits at its ends."""
    with watched(how, task.net, **options):
        for _ in range(2):  # hooks on parameters, names
            task.step()
        synchronize(device)
        gc.collect()
        gc.disable()
        try:
            began = time.perf_counter()
            for _ in range(steps):
                task.step()
            synchronize(device)
            return (time.perf_counter() - began) * 1e3 / steps
        finally:
            gc.enable()


def compiled(device: torch.device) -> Iterator[Row]:
    """Step ratios of compiled models, one graph after the other: hooks are traced into it. The peer cannot be."""
    sizes = ("small", "large, 4 layers") if device.type == "cuda" else ("tiny",)
    for size in sizes:
        for dtype in _DTYPES:
            what = f"step, compiled, {dtype}, {size}, {FORWARD}"
            try:
                plain, again, ours = (_compiled(size, dtype, device, how) for how in (PLAIN, PLAIN, FORWARD))
            except Exception as error:
                yield Row(what, "fail", note=first_line(error))
                continue
            ratio = ours / min(plain, again)
            noise = f"plain {plain:.2f} ms, again {again:.2f} ms"
            if size.startswith("large"):
                yield Row(what, passed(ratio <= COMPILED_MOST), f"{ratio:.3f}", f"at most {COMPILED_MOST}", noise)
            else:
                yield Row(what, "told", f"{ratio:.3f}", "", noise)


def _compiled(size: str, dtype: DType, device: torch.device, how: str) -> float:
    """The best block's milliseconds per step."""
    torch.compiler.reset()
    task = Task(size, device, dtype)
    steps = _STEPS[size]
    with watched(how, task.net):
        task.call = torch.compile(task.net)
        for _ in range(5):
            task.step()
        best = float("inf")
        for _ in range(_ROUNDS):
            synchronize(device)
            began = time.perf_counter()
            for _ in range(steps):
                task.step()
            synchronize(device)
            best = min(best, (time.perf_counter() - began) * 1e3 / steps)
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best
