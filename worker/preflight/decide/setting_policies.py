"""Which settings must agree between ranks, and why, in one table. The prefix decides for a setting that is not in it.

A difference stops the job only if it is known to hang it or to make NCCL refuse. If it may be meant, it is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....core.preflight import Grade

UNSET = "not set"


def as_written(value: str) -> str:
    """NCCL ignores case."""
    return value.strip().casefold()


def as_flag(value: str) -> str:
    """An unset variable means 0."""
    return "0" if value in (UNSET, "") else as_written(value)


def whether_detail(value: str) -> str:
    """Of TORCH_DISTRIBUTED_DEBUG only DETAIL changes what is sent; INFO writes logs."""
    return str(as_written(value) == "detail")


@dataclass(frozen=True)
class Policy:
    """The grade of a difference in one setting. `meaning` maps values with the same meaning to one value."""

    grade: Grade
    why: str
    meaning: Callable[[str], str] = as_written
    inside_node_only: bool = False
    """A difference between nodes is only a warning."""


_PLANS = "each rank plans every collective by itself, and ranks whose plans differ wait for each other forever"
_SIZES = "both ends of a connection compute its buffers from this, and read past each other if they differ"
_NETWORK = "ranks on different networks cannot connect to each other"
_PATH = "both ends of a connection choose their way by themselves, and in one node they must choose the same"
_DETAIL = "with DETAIL a rank sends more collectives than the others, and all hang"
_TRANSPORT = "ranks that speak different protocols cannot connect to each other"

_TABLE: dict[str, Policy] = {
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO"), Policy("fail", _PLANS)),
    **dict.fromkeys(
        ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NTHREADS"),
        Policy("fail", _PLANS),
    ),
    **dict.fromkeys(("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"), Policy("fail", _SIZES)),
    **dict.fromkeys(
        ("NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE"), Policy("fail", _SIZES)
    ),
    **dict.fromkeys(("NCCL_NET", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID"), Policy("fail", _NETWORK)),
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_OOB_NET_ENABLE"), Policy("fail", _NETWORK, as_flag)),
    # A node with broken peer-to-peer access may have it disabled in its /etc/nccl.conf on purpose.
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), Policy("fail", _PATH, as_flag, inside_node_only=True)),
    **dict.fromkeys(("NCCL_P2P_LEVEL", "NCCL_CUMEM_ENABLE"), Policy("fail", _PATH, inside_node_only=True)),
    "TORCH_DISTRIBUTED_DEBUG": Policy("fail", _DETAIL, whether_detail),
    "GLOO_DEVICE_TRANSPORT": Policy("fail", _TRANSPORT),
}

_BY_PREFIX = {
    "NCCL_": Policy("warn", "NCCL has its own value for it on each rank: the slowest rank sets the pace"),
    "TORCH_": Policy("warn", "torch has its own value for it on each rank: ranks may compute or fail in other ways"),
}

_OWN_TO_A_HOST = {
    "NCCL_SOCKET_IFNAME",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_HOSTID",
    "NCCL_MNNVL_UUID",
    "NCCL_MNNVL_CLIQUE_ID",
    "NCCL_IGNORE_CPU_AFFINITY",
    "NCCL_RAS_ADDR",
    # what is written, and by whom
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_TIMESTAMP_FORMAT",
    "NCCL_SET_THREAD_NAME",
    "TORCH_LOGS",
    "TORCH_LOGS_OUT",
    "TORCH_LOGS_FORMAT",
    "TORCH_TRACE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_CUDA_ARCH_LIST",
}
_ENDINGS_OF_PATHS = ("_FILE", "_DIR", "_PATH", "_HOME", "_CACHE")
_PARTS_OF_A_RANK = {"LOCAL", "RANK"}


def policy_of(name: str) -> Policy | None:
    """The policy for a setting; None if every rank or host may have its own value."""
    if name in _TABLE:
        return _TABLE[name]
    if name in _OWN_TO_A_HOST or name.endswith(_ENDINGS_OF_PATHS) or _PARTS_OF_A_RANK & set(name.split("_")):
        return None
    return next((policy for prefix, policy in _BY_PREFIX.items() if name.startswith(prefix)), None)
