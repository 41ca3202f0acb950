"""Samples of a batch that stand out from the others of it, and the same arguments with these replaced.

Dimension 0 of what a call is handed counts samples. One stands out that is far larger than all others, or that is all
zero or constant where the others are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree

from ...core.events.alarm_evidence import OddSamples
from ..record.names import inputs_of

LARGER = 30.0
"""How much larger than the largest of the others."""
_SHARE = 4
"""At most one sample of so many stands out: where more do, it is what this data is like."""
_MOST_ELEMENTS = 1 << 26
"""A larger tensor is not read."""


def odd_samples(module: str, args: Any, kwargs: Any, bad: torch.Tensor) -> OddSamples | None:
    """Those of the first argument that has some: large ones before others. Waits for the device.

    Tensors of shape (samples, ...), with as many samples as the first argument and as the bad tensor, whose bad rows
    are among those that stand out.
    """
    leaves = [(role, leaf) for role, leaf in inputs_of(args, kwargs) if _has_samples(leaf)]
    if not leaves or not _has_samples(bad) or len(bad) != len(leaves[0][1]):
        return None
    rows = (~bad.detach().reshape(len(bad), -1).isfinite()).any(1).nonzero().flatten().tolist()
    found = [odd for role, leaf in leaves if len(leaf) == len(bad) for odd in _odd_ones(module, role, leaf)]
    able = [odd for odd in found if set(rows) <= set(odd.indices)]
    return min(able, key=lambda odd: odd.how != "large", default=None)


def _odd_ones(module: str, role: str, leaf: Any) -> Iterator[OddSamples]:
    if not _has_samples(leaf) or not leaf.dtype.is_floating_point or leaf.numel() > _MOST_ELEMENTS:
        return
    rows = leaf.detach().reshape(len(leaf), -1).to(torch.float64 if leaf.dtype == torch.float64 else torch.float32)
    sizes = rows.abs().amax(1)
    if not bool(sizes.isfinite().all()):
        return
    for how, stands_out in _ways(rows, sizes):
        indices = stands_out.nonzero().flatten().tolist()
        if 0 < len(indices) <= max(1, len(leaf) // _SHARE):
            largest, highest = float(sizes[stands_out].max()), float(sizes[~stands_out].max())
            yield OddSamples(module, role, indices, len(leaf), how, largest, highest)
            return


def _ways(rows: torch.Tensor, sizes: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(how, which samples stand out in that way)"""
    ordered, order = sizes.sort(descending=True)
    most = max(1, len(sizes) // _SHARE)
    gaps = (ordered[:most] > LARGER * ordered[1 : most + 1]) & (ordered[1 : most + 1] > 0)
    large = torch.zeros_like(sizes, dtype=torch.bool)
    if bool(gaps.any()):
        large[order[: int(gaps.nonzero()[-1]) + 1]] = True
    yield "large", large
    yield "zero", sizes == 0
    if rows.shape[1] > 1:
        yield "constant", rows.amin(1) == rows.amax(1)


def _has_samples(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.dim() > 0 and len(leaf) > 1


def with_others(odd: OddSamples, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Copies of the arguments in which the samples of `odd` are those of the first sample that does not stand out.

    All tensors with as many samples are changed alike: a label goes with its sample.
    """
    healthy = next(index for index in range(odd.size) if index not in odd.indices)

    def replaced(leaf: Any) -> Any:
        if not _has_samples(leaf) or len(leaf) != odd.size:
            return leaf
        changed = leaf.detach().clone()
        changed[odd.indices] = leaf.detach()[healthy]
        return changed

    return _pytree.tree_map(replaced, args), _pytree.tree_map(replaced, kwargs)
