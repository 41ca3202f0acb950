"""Random numbers of a device: the seed and offset of torch's generator for CUDA make a generator of the CPU."""

from __future__ import annotations

from typing import Any

import torch

from .views import View, view

_STEP = 4  # torch wants offsets that 4 divides


def cpu_generator(generator: Any, device: int) -> torch.Generator | None:
    """The generator for one operation. The device's own moves on, so that the next operation has another."""
    if generator is None:
        torch.cuda.init()
        generator = torch.cuda.default_generators[device]
    if generator.device.type != "cuda":
        return None
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _STEP)
    return torch.Generator("cpu").manual_seed((seed * 1_000_003 + offset) % (1 << 63))


def dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """aten::native_dropout, which has no argument for a generator."""
    from .operations import issue

    device = input.get_device()
    result, mask = torch.empty_like(input), torch.empty_like(input, dtype=torch.bool)
    generator = cpu_generator(None, device)
    views = view(input), view(result), view(mask)

    def compute() -> None:
        _dropout(*views, p if train or train is None else 0.0, generator)

    issue(device, compute)
    return result, mask


def _dropout(source: View, result: View, mask: View, p: float, generator: Any) -> None:
    kept = torch.empty(mask.size, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    mask.tensor().copy_(kept)
    result.tensor().copy_(source.tensor() * kept * (1 / (1 - p) if p < 1 else 0.0))
