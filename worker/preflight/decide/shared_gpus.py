"""Ranks that share a GPU, and ranks without a GPU: NCCL refuses them or hangs."""

from __future__ import annotations

import re

from ....core.preflight import Finding
from ....core.text.ranks_text import ranks_text
from .majority import Facts, finding, have, place_text

_MULTI_RANK_NCCL = (2, 30)


def shared_gpus(facts: Facts) -> list[Finding]:
    """One finding per host, about its GPUs that more than one rank uses."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(facts):
        known = facts[rank]
        if known.uuid:
            users.setdefault((known.boot_id or known.host, known.uuid), []).append(rank)
    of_host: dict[str, list[tuple[str, list[int]]]] = {}
    for (host, uuid), ranks in users.items():
        if len(ranks) > 1:
            of_host.setdefault(host, []).append((uuid, ranks))
    return [_finding(shared, facts) for shared in of_host.values()]


def _finding(shared: list[tuple[str, list[int]]], facts: Facts) -> Finding:
    uuid, ranks = shared[0]
    known = facts[ranks[0]]
    about = ", ".join(word for word in (known.device_name, known.pci_bus) if word)
    more = f", and {len(shared) - 1} more GPUs of this host are shared, too" if len(shared) > 1 else ""
    allowed = all(_may_share(facts, rank) for _, members in shared for rank in members)
    means = "NCCL was told to allow it" if allowed else "NCCL refuses it, or hangs on it"
    everyone = [rank for _, members in shared for rank in members]
    return finding(
        "warn" if allowed else "fail",
        "gpu",
        everyone,
        facts,
        f"{place_text(ranks, facts)} share one GPU, {uuid}{f' ({about})' if about else ''}{more}; {means}",
        "" if allowed else _next(ranks, facts),
        uuid,
    )


def _may_share(facts: Facts, rank: int) -> bool:
    """From NCCL 2.30 on, and only when asked for."""
    version = tuple(int(number) for number in re.findall(r"\d+", facts[rank].versions.get("nccl", ""))[:2])
    return facts[rank].environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and version >= _MULTI_RANK_NCCL


def _next(ranks: list[int], facts: Facts) -> str:
    host = facts[ranks[0]].host or "the host"
    sharing = f"{ranks_text(ranks)} both" if len(ranks) == 2 else ranks_text(ranks)
    if len({facts[rank].node for rank in ranks}) > 1:
        return (
            f"Two launches run on {host}: give each its own GPUs with CUDA_VISIBLE_DEVICES, "
            "or start one launch there with a larger --nproc-per-node"
        )
    visible = facts[ranks[0]].environment.get("CUDA_VISIBLE_DEVICES", "")
    if len({facts[rank].local_rank for rank in ranks}) < len(ranks):
        return (
            f"{sharing} have local rank {facts[ranks[0]].local_rank}: with --virtual-local-rank, or in containers, "
            "each rank needs a CUDA_VISIBLE_DEVICES of its own"
        )
    if visible:
        return f"{sharing} find it through CUDA_VISIBLE_DEVICES={visible}: name a different GPU for each rank of {host}"
    return (
        f"Start as many ranks on {host} as it has GPUs (--nproc-per-node), and let each use the GPU of its local rank: "
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"
    )


def ranks_without_gpu(facts: Facts) -> list[Finding]:
    """Ranks on the CPU in a job with GPUs, including ranks whose GPU could not be read."""
    without = [rank for rank in sorted(facts) if not facts[rank].device.startswith("cuda")]
    with_gpu = [rank for rank in sorted(facts) if facts[rank].device.startswith("cuda")]
    blind = [rank for rank in without if facts[rank].gpus_visible == 0]
    stuck = [rank for rank in without if facts[rank].gpus_visible is None and facts[rank].device_error]
    too_many = [rank for rank in without if facts[rank].gpus_visible]
    found = []
    if with_gpu and blind:
        sentence = (
            f"{place_text(blind, facts)} {have(blind)} no GPU{_why(blind, facts)}, "
            f"{place_text(with_gpu, facts)} {have(with_gpu)} one"
        )
        next_step = (
            "Run nvidia-smi there: if it lists the GPUs, look at CUDA_VISIBLE_DEVICES, and whether the driver is new "
            "enough for this torch"
        )
        found.append(finding("fail", "node", blind, facts, sentence, next_step))
    if with_gpu and stuck:
        sentence = (
            f"{place_text(stuck, facts)} cannot use {'its' if len(stuck) == 1 else 'their'} GPU{_why(stuck, facts)}, "
            f"{place_text(with_gpu, facts)} can"
        )
        next_step = "Run nvidia-smi there: if it hangs or reports an error, too, the GPU or the node needs a reset"
        found.append(finding("fail", "rank", stuck, facts, sentence, next_step))
    if too_many:
        most = max(facts[rank].gpus_visible or 0 for rank in too_many)
        sentence = (
            f"{place_text(too_many, facts)} {have(too_many)} no GPU of {'its' if len(too_many) == 1 else 'their'} own: "
            f"the local rank is beyond the {most} that can be seen, so the CPU is tested instead"
        )
        next_step = f"Start at most {most} per node (--nproc-per-node {most}), unless the script is to run on the CPU"
        found.append(finding("warn", "node", too_many, facts, sentence, next_step))
    return found


def _why(ranks: list[int], facts: Facts) -> str:
    error = next((facts[rank].device_error for rank in ranks if facts[rank].device_error), "")
    return f" ({error})" if error else ""
