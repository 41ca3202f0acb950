"""The preflight's stages and findings, as ranks report them and the collector reads them; and the seal of its store."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

STAGES = (
    "inventory",
    "arrive",
    "consistency",
    "health",
    "allocation",
    "compute",
    "node group",
    "cross group",
    "bandwidth",
)
"""In the order in which they are reached. A run with one node has no `cross group`."""

Grade = Literal["ok", "warn", "fail", "unknown"]
"""`unknown`: it could not be measured, which is neither good nor bad."""

Subject = Literal["rank", "gpu", "node", "link", "job"]


class PreflightFinding(msgspec.Struct, frozen=True):
    """One finding of the preflight, and the ranks that it is about."""

    stage: str
    grade: Grade
    subject: Subject
    ranks: list[int]
    """The ranks to blame. For a link, and for a difference in which neither side is the odd one, both sides."""
    hosts: list[str]
    sentence: str
    """One sentence without its full stop. For a difference it has both values and both hosts."""
    next: str = ""
    """What to try next, as one sentence."""
    device: str = ""
    """UUID of the GPU, where it is about one."""
    victims: list[int] = []
    """Ranks that failed only because of it."""
    code: str = ""
    """GW3xx; "" in a report of an earlier release."""


class BandwidthRow(msgspec.Struct, frozen=True):
    """One size of the bandwidth test, as nccl-tests defines it: algbw = bytes / time, busbw = algbw * 2 (n - 1) / n."""

    size_bytes: int
    time_us: float
    algbw_gbs: float
    busbw_gbs: float


class InventoryFacts(msgspec.Struct, frozen=True):
    """What one rank runs on. Text values are as the system gives them; "" or None is unknown."""

    host: str = ""
    node: int = 0
    """GROUP_RANK of torchrun."""
    boot_id: str = ""
    device: str = "cpu"
    """`cpu`, `cuda:3`; "" until it is known."""
    device_name: str = ""
    uuid: str = ""
    """The UUID of the GPU (`GPU-...`), or of the MIG device that this rank uses (`MIG-...`)."""
    pci_bus: str = ""
    driver: str = ""
    versions: dict[str, str] = {}
    """torch, python, gpuwatch, cuda, nccl"""
    environment: dict[str, str] = {}
    """NCCL_*, TORCH_* and GLOO_* settings, NCCL's also from its configuration files; CUDA_VISIBLE_DEVICES."""
    interfaces: dict[str, list[str]] = {}
    """Interfaces that are up: name -> addresses with prefix lengths (`10.0.0.3/24`)."""
    memory_free: int | None = None
    """Bytes; of the host."""
    device_memory_free: int | None = None
    device_memory_total: int | None = None
    shm_free: int | None = None
    limits: dict[str, int] = {}
    """Soft ulimits: nofile, memlock, nproc, stack; -1 is unlimited, as memlock with CAP_IPC_LOCK is."""
    script: str = ""
    script_digest: str = ""
    """sha256 of the script file; "" where there is none (-m, --no-python, check)."""
    local_rank: int = 0
    gpus_visible: int | None = None
    """How many GPUs the rank can see."""
    device_error: str = ""
    """Why it has no GPU, or why that is unknown."""
    rdma_devices: list[str] = []
    """InfiniBand and RoCE adapters."""

    @property
    def has_gpu(self) -> bool:
        """Whether the rank has a GPU of its own, as far as is known."""
        return self.device not in ("", "cpu")


# What ranks write into a store that anybody on the network may write into: sealed with a key that only they have.

_MAC_CHARACTERS = 2 * hashlib.sha256().digest_size


class SealBroken(Exception):
    """Somebody without the key has written it."""


class WordSeal:
    """HMAC-SHA256 in front of a value, over its name, too: no value passes for another one's. Without a key: nothing.

    seal.close("arrive/3", "{}") -> "5f0c...{}"
    """

    def __init__(self, key: str = "") -> None:
        self._key = key.encode()

    def close(self, name: str, value: str) -> str:
        """The value as it goes into the store."""
        return self._mac(name, value.encode()) + value

    def open(self, name: str, sealed: bytes) -> bytes:
        """What was closed. Raises SealBroken."""
        if not self._key:
            return sealed
        mac, value = sealed[:_MAC_CHARACTERS], sealed[_MAC_CHARACTERS:]
        if not hmac.compare_digest(mac, self._mac(name, value).encode()):
            raise SealBroken(f"the store's entry {name} was not written by this job")
        return value

    def _mac(self, name: str, value: bytes) -> str:
        entry = name.encode() + b"\0" + value
        return hmac.new(self._key, entry, hashlib.sha256).hexdigest() if self._key else ""
