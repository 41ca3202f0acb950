"""Amounts of memory as a user writes them: `256MiB`, or a share of what is free, `80%`."""

from __future__ import annotations

import re

import msgspec

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}{ending}": 1024**power for power, letter in enumerate("kmgt", 1) for ending in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
"""`256M` is 256 MiB, as in nccl-tests."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", re.ASCII | re.IGNORECASE)
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%", re.ASCII)
_LARGEST = 1 << 50


class Amount(msgspec.Struct, frozen=True):
    """Bytes, or a share of what is free; one of them is 0."""

    size: int = 0
    share: float = 0.0

    def of(self, free: int) -> int:
        """Bytes, where so many are free."""
        return self.size or int(free * self.share)


def parse_size(text: str) -> int | None:
    """Bytes of at least 1; None if it is no size.

    >>> parse_size("256MiB") == parse_size("256M") == 256 * 1024**2
    True
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not 1 <= float(found[1]) * unit <= _LARGEST:
        return None
    return int(float(found[1]) * unit)


def parse_amount(text: str) -> Amount | None:
    """A size, or a share above 0 % and up to 100 %; None if it is neither.

    >>> parse_amount("80%")
    Amount(size=0, share=0.8)
    """
    found = _SHARE.fullmatch(text.strip())
    if found is None:
        size = parse_size(text)
        return Amount(size=size) if size is not None else None
    share = float(found[1]) / 100
    return Amount(share=share) if 0 < share <= 1 else None
