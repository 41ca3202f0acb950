"""Which rows of a loader's tensor a model was handed: by their bits.

A script may cast a batch, move it to a device, flatten its samples, take its first or last columns, split it along dim
0, or choose rows of it. All of that leaves rows that are found in the loader's tensor. Anything else, such as a
normalization, does not: then nothing is found.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

ENOUGH_BITS = 40.0
"""What a tensor must tell to be taken for another one: two masks of ones are equal, and say nothing."""
_MOST_BYTES = 1 << 28
_SAMPLED = 4096
_BITS_OF_A_FRACTION = 16.0
_MOST_ROWS = 4096

Positions = tuple[int, ...]


class BatchRows:
    """The rows along dim 0 of a tensor that a model was handed, which is copied to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Raises ValueError for one that has no rows, or too many bytes."""
        if not tensor.dim() or not 0 < tensor.numel() * tensor.element_size() <= _MOST_BYTES:
            raise ValueError("no rows")
        self._tensor = tensor.detach().to("cpu").contiguous()
        self._digests = _digests(self._tensor.reshape(len(tensor), -1))
        self.count = len(tensor)
        self.is_float = tensor.is_floating_point()
        self.bits = _bits_of(self._tensor)
        """How much it tells, at least."""

    def found_in(self, other: torch.Tensor) -> set[Positions]:
        """Each way in which its rows are rows of the loader's tensor: the position there of every row."""
        found: set[Positions] = set()
        if not other.dim() or not 0 < other.numel() * other.element_size() <= _MOST_BYTES:
            return found
        if len(other) < self.count:  # each sample may have become several rows
            each, rest = divmod(self.count, len(other))
            if not rest and self.is_all_of(other):
                found.add(tuple(row // each for row in range(self.count)))
            return found
        for same in _as_handed(other, self._tensor):
            found |= self._places(_digests(same))
        return found

    def is_all_of(self, other: torch.Tensor) -> bool:
        """Whether it has the numbers of the loader's tensor in their order, in whatever shape."""
        if other.numel() != self._tensor.numel():
            return False
        whole = self._tensor.reshape(1, -1)
        return any(_digests(same) == _digests(whole) for same in _as_handed(other.reshape(1, -1), whole))

    def _places(self, digests: list[bytes]) -> set[Positions]:
        first, count = self._digests[0], self.count
        starts = [start for start in range(len(digests) - count + 1) if digests[start] == first]
        found = {
            tuple(range(start, start + count)) for start in starts if digests[start : start + count] == self._digests
        }
        if found or count > _MOST_ROWS:
            return found
        places: defaultdict[bytes, list[int]] = defaultdict(list)
        for position, digest in enumerate(digests):
            places[digest].append(position)
        chosen = [places.get(digest, []) for digest in self._digests]
        # rows in another order: each has to be found by itself
        if all(len(each) == 1 for each in chosen) and all(_bits_of(row) >= ENOUGH_BITS for row in self._tensor):
            found.add(tuple(each[0] for each in chosen))
        return found


def _as_handed(other: torch.Tensor, handed: torch.Tensor) -> Iterator[torch.Tensor]:
    """The loader's tensor [n, ...] as [n, numbers of one row] in the dtype of what was handed."""
    if other.is_complex() != handed.is_complex():
        return
    other = other.detach().to("cpu")
    cast = other.to(handed.dtype)
    if not _holds(cast, other):
        return
    pictures = other.dtype is torch.uint8 and handed.is_floating_point()
    for same in (cast, cast / 255) if pictures else (cast,):
        if same[0].numel() == handed[0].numel():
            yield same.reshape(len(same), -1)
        elif same.dim() == handed.dim() > 1 and same.shape[2:] == handed.shape[2:]:
            width = handed.shape[1]
            if width < same.shape[1]:
                yield same[:, :width].reshape(len(same), -1)
                yield same[:, -width:].reshape(len(same), -1)


def _holds(cast: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a cast may be one that a script makes of data: not to fewer values, such as True for every number."""
    if cast.dtype == before.dtype:
        return True
    return cast.dtype is not torch.bool and (cast.is_floating_point() or not before.is_floating_point())


def _digests(rows: torch.Tensor) -> list[bytes]:
    data: Any = rows.contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row, digest_size=16).digest() for row in data]


def _bits_of(tensor: torch.Tensor) -> float:
    """Bits of entropy in its elements, by how often each value occurs; a fraction that occurs counts 16."""
    flat = tensor.reshape(-1)
    sample = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED]
    if sample.is_complex():
        sample = torch.view_as_real(sample).reshape(-1)
    numbers = sample.to(torch.float64)
    numbers = numbers[torch.isfinite(numbers)]
    values, counts = torch.unique(numbers, return_counts=True)
    if len(values) < 2:
        return 0.0
    fractions = int((values != values.round()).sum())
    share = counts.double() / counts.sum()
    return float(-(counts * share.log2()).sum()) + _BITS_OF_A_FRACTION * fractions
