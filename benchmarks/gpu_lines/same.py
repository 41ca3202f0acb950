"""Compares the bits with and without gpuwatch, and checks what gpuwatch sees of a replayed graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._inductor.config

from .lines import Row, first_line, passed
from .model import (
    ALL,
    BAD_MODULE,
    PLAIN,
    SIZES,
    DType,
    Net,
    Task,
    deterministic,
    digest_of,
    overflow,
    synchronize,
    watched,
)

_STEPS = 12
_BAD_FROM = 8


def bits(device: torch.device) -> Iterator[Row]:
    """Weights after a few eager steps, bf16 and fp16 with a GradScaler."""
    yield from _bits(device, "eager")


def bits_compiled(device: torch.device) -> Iterator[Row]:
    """The same for torch.compile.

    Not on the CPU: a compiled kernel there rounds to 16 bits only values that leave it, and watched ones leave it
    earlier.
    """
    yield from _bits(device, "compiled")


def _bits(device: torch.device, way: str) -> Iterator[Row]:
    deterministic()
    dtypes: tuple[DType, ...] = ("bf16", "fp16")
    for dtype in dtypes:
        what = f"same bits, {way}, {dtype}"
        try:
            digests = {how: _digest(dtype, way, device, how) for how in (PLAIN, "again", ALL)}
        except Exception as error:
            yield Row(what, "fail", note=first_line(error))
            continue
        if digests[PLAIN] != digests["again"]:
            note = "two runs without gpuwatch differ, so nothing can be said of one with it"
            yield Row(what, "skipped", digests[PLAIN], note=note)
        else:
            yield Row(what, passed(digests[ALL] == digests[PLAIN]), digests[ALL], f"{digests[PLAIN]} without")


def _digest(dtype: DType, way: str, device: torch.device, how: str) -> str:
    torch.compiler.reset()
    task = Task("tiny", device, dtype)
    with rounded_as_eager(), watched(PLAIN if how == "again" else how, task.net):
        if way == "compiled":
            task.call = torch.compile(task.net)
        for _ in range(_STEPS):
            task.step()
        synchronize(device)
    return digest_of(task.net)


def rounded_as_eager() -> AbstractContextManager[Any]:
    """Have a compiled graph round each result to its dtype, as eager does.

    Otherwise the compiler rounds only what leaves a kernel. What it fuses into one kernel depends on watched values.
    So a watched graph may have other last bits in fp16 and bf16.
    """
    if not hasattr(torch._inductor.config, "emulate_precision_casts"):  # torch 2.5
        return nullcontext()
    patched: AbstractContextManager[Any] = torch._inductor.config.patch(emulate_precision_casts=True)
    return patched


def graphed(device: torch.device) -> Iterator[Row]:
    """torch.cuda.make_graphed_callables: the forward and the backward are captured once, then replayed."""
    yield from _replayed("make_graphed_callables", device, lambda net, x: torch.cuda.make_graphed_callables(net, (x,)))


def reduce_overhead(device: torch.device) -> Iterator[Row]:
    """torch.compile(mode="reduce-overhead"), which replays CUDA graphs; on the CPU it is an ordinary compilation."""
    yield from _replayed("reduce-overhead", device, lambda net, x: torch.compile(net, mode="reduce-overhead"))
    yield from _replayed("reduce-overhead, its blocks", device, _with_compiled_blocks)


def _with_compiled_blocks(net: Net, x: torch.Tensor) -> Net:
    """They share a graph: one for each would be a sign that something of gpuwatch tells them apart."""
    for block in net.blocks:
        block.compile(mode="reduce-overhead")
    return net


def _replayed(what: str, device: torch.device, made: Callable[[Any, torch.Tensor], Any]) -> Iterator[Row]:
    """The same weights as without gpuwatch; and an overflow in a replay is found, or it is said that nobody looks."""
    deterministic()
    plain, _ = _replay(device, made, PLAIN)
    again, _ = _replay(device, made, PLAIN)
    ours, handle = _replay(device, made, ALL)
    if plain != again:
        yield Row(f"{what}: same bits", "skipped", plain, note="two runs without gpuwatch differ")
    else:
        yield Row(f"{what}: same bits", passed(ours == plain), ours, f"{plain} without")
    # of the backward: a capture warms up with gradients that nobody has written
    found = [anomaly.module for anomaly in handle.anomalies if anomaly.phase == "forward"]
    said = [repr(event) for event in handle.events if "graph" in repr(event).lower()]
    if found:
        good, figure = BAD_MODULE.startswith(found[0]), f"found in {found[0] or 'the model'}"
    else:
        good, figure = bool(said), "not seen, and said so" if said else "not seen, and not said"
    target = f"found in {BAD_MODULE}, or said not to be seen"
    yield Row(f"{what}: overflow in a replay", passed(good), figure, target, first_line(said[0]) if said else "")


def _replay(device: torch.device, made: Callable[[Any, torch.Tensor], Any], how: str) -> tuple[str, Any]:
    """Weights before the overflow, as a digest, and the handle of the watch."""
    torch.compiler.reset()
    torch.manual_seed(0)
    size = SIZES["tiny"]
    net = Net(size).to(device, torch.float16)
    x = torch.randn(size.sequences, size.length, size.width).to(device, torch.float16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with rounded_as_eager(), watched(how, net) as handle:
        call = made(net, x)
        digest = ""
        for step in range(_STEPS):
            if step == _BAD_FROM:
                synchronize(device)
                digest = digest_of(net)
                overflow(net)
            torch.compiler.cudagraph_mark_step_begin()
            loss = call(x).float().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        synchronize(device)
        for _ in range(2):  # numbers that were on their way at the last step are read
            torch.compiler.cudagraph_mark_step_begin()
            call(x)
            synchronize(device)
    return digest, handle
