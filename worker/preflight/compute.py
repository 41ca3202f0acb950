"""One seeded matmul: its exact bits and its time, to be compared with the other ranks'."""

from __future__ import annotations

import msgspec
import torch


class ComputeResult(msgspec.Struct, frozen=True):
    """What one rank computed. Equal `device_type` means that the bits must be equal."""

    digest: str
    milliseconds: float
    device_type: str


def compute(device: torch.device) -> ComputeResult:
    """Multiply, several times. Raises ProbeFailure if this device contradicts itself."""
    raise NotImplementedError
