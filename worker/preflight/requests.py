"""The requests of a coordinator to its child, and how the child performs them: one struct per test of one rank.

{"type":"Allocate","device":"cuda:0","quick":true,"sharers":1}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...core.identity import RankIdentity
from ...core.text import MemoryAmount
from .allocation import AllocationResult, allocate
from .bandwidth import measure
from .compute import compute
from .group_collectives import check_group
from .health import HealthResult, check_health, cuda_load
from .inventory import DeviceFacts, gather_device
from .meeting import group_store
from .rank_child import Say
from .stage_messages import ComputeResult, RankMeasurements


class LookAtDevice(msgspec.Struct, frozen=True, tag=True):
    """Read the facts of the rank's GPU, among the visible ones."""

    local_rank: int

    def perform(self, say: Say) -> DeviceFacts:
        """Read the facts. Initialises CUDA."""
        return gather_device(self.local_rank)


class CheckHealth(msgspec.Struct, frozen=True, tag=True):
    """Read what the driver reports of a GPU. `device` is the rank's own. On the CPU there is no load."""

    uuid: str
    rank: int
    host: str
    thresholds: str
    deadline_s: float
    device: str

    def perform(self, say: Say) -> HealthResult:
        """Check the GPU under load."""
        device = torch.device(self.device)
        load = cuda_load(device.index) if device.type == "cuda" else None
        return check_health(self.uuid, self.rank, self.host, self.thresholds, self.deadline_s, load)


class AllocationRequest(msgspec.Struct, frozen=True, tag=True):
    """Test the memory of a device. None: the mode's default amount."""

    device: str
    amount: MemoryAmount | None
    quick: bool
    sharers: int

    def perform(self, say: Say) -> AllocationResult:
        """Write the memory and read it back."""
        return allocate(torch.device(self.device), self.amount, quick=self.quick, sharers=self.sharers)


class ComputeRequest(msgspec.Struct, frozen=True, tag=True):
    """Compute a matmul."""

    device: str

    def perform(self, say: Say) -> ComputeResult:
        """The matmul's bits and its time."""
        return compute(torch.device(self.device))


class InGroup(msgspec.Struct, frozen=True, tag=True):
    """Test a process group of `ranks`, whose store is below `prefix` and `name`. The child must end after it."""

    bandwidth: bool
    identity: RankIdentity
    prefix: str
    name: str
    device: str
    backend: str
    ranks: list[int]
    timeout_s: float
    log: str = ""
    """Path of NCCL's log; "" for none."""
    largest_bytes: int = 0

    def perform(self, say: Say) -> str | RankMeasurements:
        """Run the collectives, or measure their bandwidth."""
        if self.log:
            Path(self.log).parent.mkdir(parents=True, exist_ok=True)
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=self.log)
        store = group_store(self.identity, self.prefix, self.name, self.timeout_s)
        device, rank = torch.device(self.device), self.identity.rank
        if self.bandwidth:
            return measure(
                store, device, self.backend, self.ranks, rank, self.timeout_s, say, largest_bytes=self.largest_bytes
            )
        return check_group(store, device, self.backend, self.ranks, rank, self.timeout_s, say)


Request = LookAtDevice | CheckHealth | AllocationRequest | ComputeRequest | InGroup

_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


def perform(request: bytes, say: Say) -> Any:
    """Perform a request, in the child. Empties torch's cache: the next test or another rank may need the memory."""
    result = _decoder.decode(request).perform(say)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no annotations there
        torch.cuda.empty_cache()
    return result
