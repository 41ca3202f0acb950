"""How fast is an all_reduce, and which link is the slowest? Numbers as nccl-tests defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch.distributed.distributed_c10d import Store

from ...core.preflight import BandwidthRow, Finding


class LinkSpeed(msgspec.Struct, frozen=True):
    """What two neighbours in the order of ranks sent each other at once, in GB/s each way."""

    first: int
    second: int
    gbs: float


class Measured(msgspec.Struct, frozen=True):
    """What one rank measured; `links` are those of which it is the first."""

    rows: list[BandwidthRow]
    links: list[LinkSpeed] = []


def measure(
    store: Store,
    device: torch.device,
    backend: str,
    ranks: Sequence[int],
    rank: int,
    timeout_s: float,
    say: Callable[[str], None],
    largest_bytes: int = 0,
) -> Measured:
    """Sizes up to `largest_bytes` (0: the device's own), as long as `timeout_s` allows. Parameters as check_group's."""
    raise NotImplementedError


def slowest(measured: Mapping[int, Measured]) -> BandwidthRow | None:
    """The row of the rank that took longest at the largest size."""
    raise NotImplementedError


def below(measured: Mapping[int, Measured], hosts: Mapping[int, str], min_busbw: float) -> Finding | None:
    """Grade fail if the slowest rank's bus bandwidth at the largest size is below `min_busbw` GB/s."""
    raise NotImplementedError


def slow_links(measured: Mapping[int, Measured], hosts: Mapping[int, str], factor: float = 3.0) -> list[Finding]:
    """Links that are slow beside the good ones of their kind (inside a host, between hosts). Grade warn."""
    raise NotImplementedError
