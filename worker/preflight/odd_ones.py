"""Which rank is unlike the others: another result of the same matmul, or a slow one. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.preflight import Finding
from .compute import ComputeResult


def odd_digests(
    results: Mapping[int, ComputeResult], hosts: Mapping[int, str], uuids: Mapping[int, str] | None = None
) -> list[Finding]:
    """Ranks whose bits are not those of most ranks with the same device type. Grade fail."""
    raise NotImplementedError


def slow_devices(
    results: Mapping[int, ComputeResult],
    hosts: Mapping[int, str],
    factor: float = 1.5,
    uuids: Mapping[int, str] | None = None,
) -> list[Finding]:
    """Ranks that took more than `factor` times the median of all. Grade warn."""
    raise NotImplementedError
