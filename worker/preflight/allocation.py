"""Memory: take a real share of what is free, write a pattern, read it back."""

from __future__ import annotations

import torch

from ...core.amount import Amount


def allocate(device: torch.device, amount: Amount | None, *, quick: bool = False, sharers: int = 1) -> str:
    """Test `amount` of memory, None for the mode's own; what was done, in words. Raises ProbeFailure.

    `sharers` is how many ranks take their share of the same memory at once: LOCAL_WORLD_SIZE on the CPU, 1 on CUDA.
    """
    raise NotImplementedError
