"""The meaning of known failure lines in logs of NCCL and gloo and in torch's messages. Pure.

    node-e:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No rou...

becomes "there is no route to 10.0.0.4", with advice what to try next.
"""

from __future__ import annotations

import re

import msgspec

from . import known_job_errors


class ErrorExplanation(msgspec.Struct, frozen=True):
    """One cause, found in one line of a log."""

    sentence: str
    """The cause, without a full stop."""
    next: str
    """What to try next."""
    line: str
    """The log line with the cause."""
    own: bool
    """The fault is on the rank, GPU or host that wrote the line. Else: a peer, the network or the job."""


_CUDA = r"(?:Cuda failure (?:\d+ )?'|CUDA error:? |CUDA failure \S+ ')"
_CONNECT = r"(?:Connect to |connect \[)(?P<peer>[^\s\]]+)\]?"
_RDMA_TCP = "To see whether it runs over TCP: NCCL_IB_DISABLE=1."

_Meanings = dict[str, tuple[str, str]]
"""Pattern -> the cause, and what to try next, the most specific first.

The cause may use the pattern's named groups. The port is removed from `peer`.
"""

_OF_THE_WRITER: _Meanings = {
    # -- the device ---------------------------------------------------------------------------------------------------
    r"Duplicate GPU detected ?: rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device (?P<bus>[0-9a-f]+)": (
        "ranks {a} and {b} of the group use one and the same GPU (PCI bus {bus})",
        "Start no more ranks on a node than it has GPUs, and let each rank use cuda:LOCAL_RANK.",
    ),
    # NCCL 2.30 and later
    r"Multiple Ranks are using the same GPU/Partition": (
        "two ranks of the group use one and the same GPU",
        "Start no more ranks on a node than it has GPUs, and let each rank use cuda:LOCAL_RANK; "
        "if ranks are to share one: NCCL_MULTI_RANK_GPU_ENABLE=1.",
    ),
    r"NCCL_NVLS_ENABLE has been set to \S+ and communicator has multiple ranks using the same NVML device": (
        "ranks share a GPU, with which NVLink SHARP cannot be used, and NCCL_NVLS_ENABLE=1 asks for it",
        "Unset NCCL_NVLS_ENABLE: NCCL then leaves NVLink SHARP out where it cannot be used.",
    ),
    r"NVRM: Xid \(PCI:(?P<bus>[^)]+)\): (?P<xid>\d+)": (
        "the driver reported XID {xid} for the GPU at {bus}",
        "Look the number up in NVIDIA's XID catalog; most of these need a reset of the GPU.",
    ),
    r"uncorrectable ECC error": (
        "the GPU met a memory error that ECC could not correct",
        "Reset the GPU (nvidia-smi -r) and read `nvidia-smi -q -d ECC,ROW_REMAPPER`; if the error comes back, take "
        "the GPU out.",
    ),
    r"(?:Cuda failure (?:\d+ )?'|CUDA failure \S+ ')out of memory|Failed to CUDA (?:host )?[cm]?alloc": (
        "the GPU had no memory left for NCCL's own buffers",
        "Look for other processes on this GPU (nvidia-smi), or leave more of its memory free.",
    ),
    r"system not yet initialized": (
        "the NVSwitch fabric of this host is not up: nvidia-fabricmanager is not running, or not the driver's version",
        "Run `systemctl status nvidia-fabricmanager`, and give it exactly the version of the driver.",
    ),
    _CUDA + r"CUDA driver version is insufficient|CUDA driver version is insufficient for CUDA runtime": (
        "the NVIDIA driver of this host is too old for the CUDA that torch was built with",
        "Update the driver, or install a torch for an older CUDA; `nvidia-smi` shows the newest CUDA that it can do.",
    ),
    r"API call is not supported in the installed CUDA driver": (
        "NCCL needs a function that the NVIDIA driver of this host does not have",
        "Update the driver, or use an older NCCL; with NCCL_CUMEM_ENABLE=0 it needs less of the driver.",
    ),
    r"peer access is not supported between these two devices": (
        "two GPUs of this host cannot reach each other's memory (no peer access)",
        "Compare `nvidia-smi topo -p2p r`; to go through host memory instead: NCCL_P2P_DISABLE=1.",
    ),
    _CUDA + r"invalid device ordinal": (
        "a rank asked for a GPU that it cannot see",
        "Start no more ranks on a node than it has GPUs (--nproc-per-node), and let each see all of them: no "
        "CUDA_VISIBLE_DEVICES or --gpus-per-task per rank.",
    ),
    r"CUDA-capable device\(s\) is/are busy or unavailable": (
        "the GPU is busy or unavailable: another process has exclusive use of it, or it needs a reset",
        "Look at its compute mode and processes (nvidia-smi -q -d COMPUTE,PIDS), and at dmesg for a reset required.",
    ),
    _CUDA + r"(?P<what>unspecified launch failure|an illegal memory access was encountered)": (
        "a kernel crashed on this GPU ({what})",
        "Look for an XID in dmesg at that time: 31 points to the program, 48, 63, 79, 94 and 95 to the hardware.",
    ),
    _CUDA + r"initialization error": (
        "CUDA could not be initialised in this process",
        "Run nvidia-smi in the same container: the driver's devices or libraries may not be mapped into it.",
    ),
    r"transport/nvls\.cc:\d+ (?:\(\w+\) )?NCCL WARN (?:Cuda|CUDA) (?:failure|error)": (
        "NVLink SHARP (NVLS) could not be set up: most often the fabric manager was restarted under the GPUs",
        "Restart nvidia-fabricmanager and reset the GPUs, or reboot; to do without: NCCL_NVLS_ENABLE=0.",
    ),
    # -- the host -----------------------------------------------------------------------------------------------------
    r"(?:failed to extend|while creating shared memory segment) (?P<path>/dev/shm/\S+)|posix_fallocate failed": (
        "/dev/shm of this host is full or too small for NCCL",
        "Make it larger (docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory), and remove "
        "what earlier runs left in /dev/shm/nccl-*.",
    ),
    r"while attaching to shared memory segment \S+ .*No such file": (
        "a rank could not open the shared memory of another one on its host: the two do not share one /dev/shm",
        "Start the ranks of a node in one container; to try without: NCCL_CUMEM_HOST_ENABLE=0 or NCCL_SHM_DISABLE=1.",
    ),
    r"Too many open files": (
        "the limit of open files of this host is too low",
        "Raise it (ulimit -n 65536, LimitNOFILE of the service, or --ulimit nofile of the container).",
    ),
    r"no (?:NCCL_SOCKET_IFNAME )?(?:socket )?interface found|connecting to address +with family \d+ is neither": (
        "NCCL found no network interface on this host that it may use",
        "Set NCCL_SOCKET_IFNAME to an interface that `ip addr` lists here, or unset it.",
    ),
    r"Unable to find (?:address|interface) for: (?P<name>\S+)": (
        "gloo is set to use the interface {name}, which this host does not have",
        "Set GLOO_SOCKET_IFNAME to an interface that `ip addr` lists here, or unset it.",
    ),
    (
        r"Using the loopback\s+address as fallback|SO_ERROR: Connection refused, remote=\[127\."
        r"|connect \[127\.[\d.]+\]:\d+: Connection refused"
    ): (
        "gloo takes the loopback address for a host's own: the host's name does not resolve to its real address",
        "Set GLOO_SOCKET_IFNAME to the interface between the nodes, or correct the host's line in /etc/hosts.",
    ),
    # -- InfiniBand and RoCE ------------------------------------------------------------------------------------------
    r"ibv_reg_(?:mr|mr_iova2|dmabuf_mr) failed with (?:error )?(?:\d+ )?Cannot allocate memory": (
        "RDMA memory could not be locked: the limit of locked memory (ulimit -l) of this host is too low",
        "Set `memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK of the service, or --ulimit memlock=-1.",
    ),
    (
        r"ibv_reg_(?:mr|mr_iova2|dmabuf_mr) failed with (?:error )?(?:\d+ )?(?:Operation not supported|Bad address)"
        r"|Got async event ?: local access violation"
        r"|Got completion .*(?:error |status=)4\b.*vendor err 81"
    ): (
        "GPUDirect RDMA does not work on this host: the NIC may not use the GPU's memory",
        "Load nvidia-peermem, built for this driver and OFED; turn off ACS and the IOMMU's translation; to do without: "
        "NCCL_NET_GDR_LEVEL=LOC or NCCL_DMABUF_ENABLE=0.",
    ),
    r"Got async event ?: (?:port error|port_err)": (
        "the InfiniBand or RoCE port of this host has lost its link",
        "Look at the cable and at the port's error counters (ibqueryerrors, ethtool -S): the link comes and goes.",
    ),
    r"ncclIbRoceGetVersionNum": (
        "RoCE: an entry in the NIC's GID table cannot be read, as in a container that has only some of its networks",
        "Set NCCL_IB_GID_INDEX to an entry that `show_gids` lists in the container; update NCCL.",
    ),
    r"ibv_modify_qp failed with (?:error )?(?:\d+ )?(?:No such device|Invalid argument)": (
        "RDMA: the NIC of this host does not have the GID that NCCL uses",
        f"Set NCCL_IB_GID_INDEX to an entry that `show_gids` lists. {_RDMA_TCP}",
    ),
}
"""The fault is on the rank, GPU or host that wrote the line."""

_OF_OTHERS: _Meanings = {
    # -- InfiniBand and RoCE ------------------------------------------------------------------------------------------
    (
        r"(?:ibv_modify_qp failed with (?:error )?(?:\d+ )?|Failed to modify QP to RTR[^:]*: )"
        r"(?P<why>Connection timed out|Network is unreachable|No data available)"
    ): (
        "RDMA: the NICs of two hosts do not reach each other ({why})",
        "Set NCCL_IB_GID_INDEX to the routed RoCE v2 GID (show_gids); with one switch per NIC: NCCL_CROSS_NIC=0. "
        f"{_RDMA_TCP}",
    ),
    r"Got completion (?:from peer (?P<peer>\S+) )?with (?:error |status=)12\b": (
        "RDMA: packets{to_peer} were not answered",
        f"Test the pair with ib_write_bw; look at NCCL_IB_GID_INDEX, the MTU and the switch's filters. {_RDMA_TCP}",
    ),
    # -- the job ------------------------------------------------------------------------------------------------------
    (
        r"Mismatched NCCL version detected ?: rank (?P<a>\d+) version (?P<one>\d+) "
        r"rank (?P<b>\d+) version (?P<two>\d+)"
    ): (
        "ranks {a} and {b} of the group run different NCCL versions ({one} and {two})",
        "Install the same torch and NCCL on all nodes; look at LD_LIBRARY_PATH and LD_PRELOAD for a second libnccl.",
    ),
    r"collective mismatch error|Mismatched collective detected|receiving \d+ bytes instead of \d+": (
        "the ranks do not send each other what they expect: another collective, another size, or other NCCL settings",
        "Compare the NCCL versions and NCCL_* settings of all ranks; they must be the same.",
    ),
    r"wrong type \d+ != \d+": (
        "a process outside of the group connected to NCCL: another job, or a port scan",
        "Compare the NCCL versions and settings of all ranks, and keep other jobs and scanners off these hosts' ports.",
    ),
    # -- the network --------------------------------------------------------------------------------------------------
    _CONNECT + r".*No route to host|No route to host": (
        "there is no route{to_peer}",
        "Look at routes and firewalls between the two; set NCCL_SOCKET_IFNAME to the interface between the nodes.",
    ),
    _CONNECT + r".*Network is unreachable": (
        "there is no network{to_peer}",
        "Set NCCL_SOCKET_IFNAME to the interface between the nodes: the other ranks were given the address of "
        "another one.",
    ),
    _CONNECT + r".*Software caused connection abort": (
        "connections{to_peer} were refused or cut off while they were made",
        "Look at firewalls between the two, and at whether the peer had ended; set NCCL_SOCKET_IFNAME.",
    ),
    (
        _CONNECT + r".*Connection refused|connect timeout ?: Connection refused"
        r"|SO_ERROR: Connection refused, remote=\[(?P<peer_2>[^\]]+)\]"
    ): (
        "nobody accepted a connection{to_peer}: the rank there has ended, or this is the address of another interface",
        "Look for the first rank that failed; set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to the interface between "
        "the nodes.",
    ),
    _CONNECT + r".*(?:Connection timed out|timed out)": (
        "connections{to_peer} were not answered",
        "Look for a firewall between the two that drops packets; set NCCL_SOCKET_IFNAME.",
    ),
    # -- what follows from another rank's fault -----------------------------------------------------------------------
    (
        r"socketProgress: Connection closed by remote peer (?P<peer>\S+)"
        r"|Connection closed by peer \[(?P<peer_2>[^\]]+)\]"
    ): ("the rank at {peer} went away", "Read the last output of that rank: it failed first."),
    r"Got completion (?:from peer (?P<peer>\S+) )?with (?:error |status=)(?P<status>\d+)": (
        "an RDMA transfer{with_peer} failed (status {status}): its connection broke, most often after another error",
        "Look for the first failure in the logs of both hosts.",
    ),
    r"remote process exit(?:ing|ed)?\b|remote process exting|ncclRemoteError": (
        "another rank ended, or the network to it broke",
        "Look for the first rank that failed.",
    ),
    r"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=(?P<op>\w+).*ran for": (
        "a collective ({op}) did not end: some rank took no part in it",
        "Look for the rank that was somewhere else at that time.",
    ),
    # the backend nccl2, which is torch's own from 2.15 on: it does not say which collective
    r"NCCL operation timed out": (
        "a collective did not end: some rank took no part in it",
        "Look for the rank that was somewhere else at that time.",
    ),
    r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation": (
        "another rank did not answer within {ms} ms",
        "Look for the rank that hangs, or for packets that are dropped on the way to it.",
    ),
    r"wait timeout after (?P<ms>\d+)ms, keys|^Wait timeout|Socket Timeout": (
        "another rank did not reach the group in time",
        "Look for the rank that failed or hangs before it.",
    ),
}
"""The fault is that of a peer, of the network or of the job."""

_GENERAL: _Meanings = {
    _CUDA + r"(?P<what>[^'\n]+)": (
        "a CUDA call failed on this GPU ({what})",
        "Look for an XID in dmesg, and run again with --nccl-debug.",
    ),
    r"unhandled (?P<what>cuda|system) error": (
        "NCCL met a {what} error and gives no details here",
        "Run again with --nccl-debug, which writes NCCL's own log.",
    ),
}
"""Something failed, without a cause. These count only if no other one matches."""

_TABLES = (
    (
        (_OF_THE_WRITER, True),
        (known_job_errors.OF_THE_WRITER, True),
        (_OF_OTHERS, False),
        (known_job_errors.OF_OTHERS, False),
    ),
    ((_GENERAL, True),),
)


def explain(text: str) -> list[ErrorExplanation]:
    """Every known cause in a log, each once, the most specific first."""
    for tables in _TABLES:
        found = [
            _explanation(match, text, sentence, next_, own)
            for table, own in tables
            for pattern, (sentence, next_) in table.items()
            if (match := re.search(pattern, text, re.MULTILINE | re.IGNORECASE))
        ]
        if found:
            return found
    return []


def _explanation(match: re.Match[str], text: str, sentence: str, next_: str, own: bool) -> ErrorExplanation:
    groups = match.groupdict("")
    unused = groups.get("unused", "").strip()
    # the port of `10.0.0.4<56849>` and `127.0.0.1]:4509` is not used
    peer = re.sub(r"<\d+>.*$", "", groups.get("peer") or groups.get("peer_2") or "")
    named = {
        **groups,
        "peer": peer or "the other end",
        "to_peer": f" to {peer}" if peer else "",
        "with_peer": f" with {peer}" if peer else "",
        "unused": f" ({unused})" if unused else "",
    }
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.start())
    line = text[start : end if end >= 0 else len(text)].strip()
    return ErrorExplanation(sentence.format(**named), next_.format(**named), line[:500], own)
