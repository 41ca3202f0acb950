"""The digest of a batch's tensors, so that the sample behind an overflow can be found in the data again."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ..stats.device import is_on_device

_BYTES = 8
_MOST_BYTES = 1 << 28
"""Of a larger tensor there is no digest: it would take a second."""
_MOST_DIGESTED = 16


def batch_digest(arguments: list[tuple[str, Any]]) -> dict[str, str]:
    """Role -> digest, of the arguments that are tensors in host memory.

    It is `hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy(), digest_size=8).hexdigest()`.
    """
    found: dict[str, str] = {}
    for role, leaf in arguments:
        if len(found) < _MOST_DIGESTED and isinstance(leaf, torch.Tensor) and _is_plain(leaf):
            data: Any = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[role] = hashlib.blake2b(data, digest_size=_BYTES).hexdigest()
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not is_on_device(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and 0 < tensor.numel() * tensor.element_size() <= _MOST_BYTES
    )
